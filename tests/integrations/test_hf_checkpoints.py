"""Hugging Face's own save_pretrained and from_pretrained keep the gates."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

import blockgate as bg
import blockgate.integrations.huggingface
from tests.helpers import raises_blockgate
from tests.model_zoo import bert, gpt2, tokens

OPTIONS = [
    {"block_size": 8},
    {"block_size": (1536, 1), "gate": "norm"},
    {"block_size": 8, "gate": "topk", "normalise": "none"},
]


@pytest.mark.parametrize("make", [gpt2, bert])
@pytest.mark.parametrize("options", OPTIONS, ids=["margin", "norm", "topk"])
def test_round_trip(tmp_path, make, options, recwarn):
    model, example = make().eval(), {"input_ids": tokens()}
    bg.sparsify_(model, sparsity=0.25, **options)
    bg.set_sparsity(model, 0.6)
    with torch.no_grad():
        wanted = model(**example).logits
    model.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]
    assert loaded.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(**example).logits, wanted)
    assert bg.summary(loaded, example).layers[1].target_density == bg.summary(model, example).layers[1].target_density
    # Both are models like any other afterwards, and save again.
    for one in (model, loaded):
        assert not getattr(one, "is_quantized", False)
        assert not hasattr(one.config, "quantization_config")
        one.double().float()
    loaded.save_pretrained(tmp_path / "again")
    entry = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert entry["quant_method"] == "blockgate"
    assert all(layer["options"]["sparsity"] == 0.6 for layer in entry["layers"].values())
    assert not [w for w in recwarn if "blockgate" in str(w.message)]


def test_copies_save_themselves(tmp_path):
    model = gpt2()
    bg.sparsify_(model, block_size=8)
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.transformer.h[0].mlp.c_fc.bias)
    nn.init.ones_(model.transformer.h[0].mlp.c_fc.bias)
    twin.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.transformer.h[0].mlp.c_fc.bias.abs().sum() == 0


def test_packed_models_are_refused(tmp_path):
    model = gpt2()
    bg.sparsify_(model, block_size=8)
    with raises_blockgate("save_pretrained: expected a model that is not packed"):
        bg.pack(model).save_pretrained(tmp_path)


def edited(folder, change):
    """A saved model's config after a stranger's hand."""
    model = gpt2()
    bg.sparsify_(model, block_size=8)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    return type(model)


@pytest.mark.parametrize("option", [{"gate_hidden": 10**9}, {"gate_hidden": 2**40}, {"block_size": [1, 1]}])
def test_nothing_is_made_that_the_file_cannot_fill(tmp_path, option, monkeypatch):
    def ask(entry):
        for layer in entry["layers"].values():
            layer["options"] |= option

    kind, made, whole = edited(tmp_path, ask), [], torch.empty

    def watched(*size, **kwargs):
        # All of it on meta, so that a failing test takes no memory either.
        tensor = whole(*size, **kwargs | {"device": "meta"})
        made.append(0 if str(kwargs.get("device")) == "meta" else tensor.numel())
        return tensor

    monkeypatch.setattr(torch, "empty", watched)
    with raises_blockgate("a tensor in the weights file of the shape that the config says"):
        kind.from_pretrained(tmp_path)
    assert max(made, default=0) < 100_000


def _set(entry, value):
    entry["layers"] = value


def _spoil_options(entry):
    next(iter(entry["layers"].values()))["options"] = [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry: _set(entry, 3), "class and options of layer"),
        (lambda entry: _set(entry, {"x": {}}), "class and options of layer 'x'"),
        (lambda entry: entry.pop("layers"), "class and options of layer"),
        (_spoil_options, "class and options of layer"),
    ],
    ids=["number", "empty", "missing", "options"],
)
def test_odd_entries_are_one_error(tmp_path, change, message):
    kind = edited(tmp_path, change)
    with raises_blockgate(message):
        kind.from_pretrained(tmp_path)
