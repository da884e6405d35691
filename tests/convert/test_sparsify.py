"""The rules of `sparsify_`: which layers it gates, with which options, and what it says about the others."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, prune

import blockgate as bg
from blockgate.convert.candidates import HEAD_NAMES
from tests.helpers import raises_blockgate


class MLP(nn.Module):
    """Two layers that pay, two too small, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 128)
        self.second = nn.Linear(128, 64)
        self.small = nn.Linear(64, 8)
        self.back = nn.Linear(8, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        for layer in (self.first, self.second, self.small, self.back):
            x = torch.relu(layer(x))
        return self.out(x)


def convert(model, **options):
    return bg.sparsify_(model, **{"block_size": 16, **options})


def reasons(report) -> dict[str, str]:
    return {layer.name: layer.reason for layer in report.skipped}


def converted(report) -> list[str]:
    return [layer.name for layer in report.converted]


def test_default_rules_and_their_reasons():
    model = MLP()
    report = convert(model)
    assert converted(report) == ["first", "second"]
    assert reasons(report) == {
        "small": "too small to pay: 1x4 blocks",
        "back": "too small to pay: 4x1 blocks",
        "out": "output head: the last linear layer, whose outputs no layer reads",
    }
    assert isinstance(model.first, bg.DynamicSparseLinear)
    assert type(model.out) is nn.Linear


def test_weights_stay_the_same_objects():
    model = MLP()
    weight, bias = model.first.weight, model.first.bias
    convert(model)
    assert model.first.weight is weight
    assert model.first.bias is bias


@pytest.mark.parametrize("name", ["lm_head", "classifier", "score", "decoder"])
def test_heads_by_name(name):
    model = nn.ModuleDict({"body": nn.Linear(64, 64), name: nn.Linear(64, 64), "more": nn.Linear(64, 64)})
    assert reasons(convert(model)) == {name: f"output head, by its name {name!r}"}


def test_the_documentation_lists_the_names_of_heads():
    page = (Path(__file__).parents[2] / "docs" / "convert.md").read_text()
    listed = page[page.index("| output heads") : page.index("or it is the last linear layer")]
    assert set(re.findall(r"`(\w+)`", listed)) == HEAD_NAMES


def test_layers_inside_a_module_with_the_name_of_a_head_are_none():
    model = nn.ModuleDict({"classifier": nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10))})
    report = convert(model)
    assert converted(report) == ["classifier.0"]
    assert "the last linear layer" in reasons(report)["classifier.1"]


def test_a_last_layer_whose_outputs_are_read_again_is_no_head():
    assert converted(convert(nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)))) == ["0", "1"]


def test_shared_weights_are_left_unless_named_and_stay_shared():
    model = nn.ModuleDict({"body": nn.Linear(64, 64), "embedding": nn.Embedding(48, 64), "to_words": nn.Linear(64, 48)})
    model["to_words"].weight = model["embedding"].weight
    model["more"] = nn.Linear(48, 64)
    report = convert(model)
    assert reasons(report) == {"to_words": "its weight is shared with 'embedding'"}
    convert(model, options={"to_words": {}})
    assert model["to_words"].weight is model["embedding"].weight


def test_filter_fn_replaces_the_default_rules():
    model, seen = MLP(), []
    report = convert(model, filter_fn=lambda module, name: seen.append((module, name)) or name in {"out", "small"})
    assert converted(report) == ["small", "out"]
    assert reasons(report) == dict.fromkeys(["first", "second", "back"], "left out by filter_fn")
    assert [name for _, name in seen] == ["first", "second", "small", "back", "out"]
    assert all(isinstance(module, nn.Linear) for module, _ in seen)


def test_options_per_layer():
    model = MLP()
    own = {"first": None, "s*": {"sparsity": 0.75, "block_size": (8, 4), "key_size": 8, "select": "per_row"}}
    report = convert(model, sparsity=0.25, key_size=None, normalise="rms", options={**own, "out": {"block_size": 5}})
    assert converted(report) == ["second", "out"]
    assert reasons(report)["first"] == "left out by options['first']"
    assert model.second.sparsity == 0.75
    assert model.second.grid.block == (8, 4)
    assert model.second.gate.key_size == 8
    assert model.second.gate.select == "per_row"
    assert model.second.gate.normalise == "rms"
    assert model.out.sparsity == 0.25
    assert model.out.grid.block == (5, 5)
    assert model.out.gate.key_size == 64


def test_a_wildcard_does_not_gate_heads_but_their_full_name_does():
    assert "out" in reasons(convert(MLP(), options={"*": {"sparsity": 0.9}}))
    assert "out" in reasons(convert(MLP(), options={"ou?": {"sparsity": 0.9}}))
    assert "out" in converted(convert(MLP(), options={"out": {"sparsity": 0.9}}))


def test_the_second_call_changes_nothing():
    model = MLP()
    convert(model, options={"second": {"sparsity": 0.9}})
    before = list(model.modules())
    again = convert(model, sparsity=0.1, options={"second": {"sparsity": 0.2}})
    assert again.converted == ()
    assert reasons(again)["first"] == "already gated"
    assert list(model.modules()) == before
    assert model.second.sparsity == 0.9


def test_shared_layers_are_converted_once_and_stay_shared():
    layer = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer, nn.Linear(32, 32))})
    report = convert(model, options={"b.0": {"sparsity": 0.75}})
    assert model["a"] is model["b"][0]
    assert model["a"].sparsity == 0.75
    assert [(entry.name, entry.also) for entry in report.layers] == [("a", ("b.0",)), ("b.1", ())]


class Special(nn.Linear):
    pass


def weight_normed() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(32, 32))


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(32, 32), "weight", amount=0.5)


def hooked() -> nn.Module:
    layer = nn.Linear(32, 32)
    layer.register_forward_hook(lambda *_: None)
    return layer


def patched() -> nn.Module:
    layer = nn.Linear(32, 32)
    layer.forward = lambda x: x
    return layer


def without_weight() -> nn.Module:
    layer = nn.Linear(32, 32)
    weight = layer.weight
    del layer.weight
    layer.weight = weight.detach()
    return layer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Special(32, 32), "a subclass of Linear, which may compute something else"),
        (weight_normed, "parametrized: remove its parametrizations first"),
        (pruned, "has hooks, as pruned layers have: remove them first"),
        (hooked, "has hooks, as pruned layers have: remove them first"),
        (patched, "its forward was replaced"),
        (without_weight, "its weight is no parameter of its own"),
        (lambda: nn.LazyLinear(32), "lazy: run a batch through the model first"),
        (lambda: nn.Linear(32, 32, dtype=torch.complex64), "its weight is a Parameter of complex64"),
        (lambda: nn.RNN(32, 32), "has no gated form"),
        (lambda: nn.LSTM(32, 32, proj_size=8), "LSTMs with a projection have no gated form"),
        (lambda: nn.MultiheadAttention(32, 2), "torch's attention reads the weights of its projections itself"),
        (lambda: bg.pack(nn.Linear(32, 32)), "packed, for inference only"),
        (lambda: bg.DynamicSparseLinear(32, 32), "already gated"),
    ],
)
def test_layers_that_cannot_be_gated_give_their_reason(make, reason):
    odd = make()
    model = nn.ModuleDict({"odd": odd, "plain": nn.Linear(32, 32)})
    report = convert(model, filter_fn=lambda *_: True)
    assert converted(report) == ["plain"]
    assert reason in reasons(report)["odd"]
    assert model["odd"] is odd
    if reason != "already gated":
        with raises_blockgate("layer 'odd': expected a layer that can be gated, got "):
            convert(model, options={"odd": {}})


def test_the_report_prints_and_becomes_json():
    report = convert(MLP(), example_input=torch.randn(4, 64))
    table = str(report)
    lines = table.splitlines()
    assert lines[0].split() == ["layer", "kind", "blocks", "open", "gate", "parameters"]
    assert lines[1].split() == ["first", "Linear", "8x4", "50.0%", "2,080", "gated"]
    assert "small" in table
    assert "skipped: too small to pay" in table
    assert "2 layers gated, 3 skipped, 6,208 gate parameters added" in table
    assert "output at sparsity 0 differs by " in lines[-1]
    data = json.loads(json.dumps(report.to_dict()))
    assert data["layers"][0] == {
        "name": "first",
        "kind": "Linear",
        "converted": True,
        "reason": "",
        "grids": [[8, 4]],
        "densities": [0.5],
        "gate_parameters": 2080,
        "also": [],
    }
    assert data["relative_difference"] == report.relative_difference


@given(
    widths=st.lists(st.integers(1, 40), min_size=3, max_size=5),
    block=st.integers(1, 20),
    left_out=st.sets(st.integers(1, 4)),
)
def test_every_layer_is_gated_or_has_a_reason(widths, block, left_out):
    model = nn.Sequential(*(nn.Linear(*sizes) for sizes in pairwise(widths)))
    report = bg.sparsify_(model, block_size=block, filter_fn=lambda _, name: int(name) not in left_out)
    assert [layer.name for layer in report.layers] == [str(i) for i in range(len(model))]
    for entry, layer in zip(report.layers, model, strict=True):
        assert entry.converted == isinstance(layer, bg.DynamicSparseLinear) == (int(entry.name) not in left_out)
        assert entry.reason == ("" if entry.converted else "left out by filter_fn")
        if entry.converted:
            assert entry.gate_parameters == sum(p.numel() for p in layer.gate.parameters())
            assert entry.grids == ((layer.grid.out_blocks, layer.grid.in_blocks),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sparsity": 1.0}, "sparsity: expected a number in [0, 1), got 1.0"),
        ({"block_size": 0}, "block_size (out): expected a positive int, got 0"),
        ({"key_size": 100}, "layer 'first': key_size: expected an int from 1 to 64"),
        ({"gate": "fancy"}, "layer 'first': gate: expected one of ('topk', 'eq1', "),
        ({"device": "cpu"}, "option: expected one of ('block_size', 'sparsity', "),
        (
            {"options": {"second": {"spasity": 0.5}}},
            "options['second']: option: expected one of ('block_size', ",
        ),
        ({"options": {"second": {"sparsity": 2}}}, "options['second']: sparsity: expected a number in [0, 1), got 2"),
        ({"options": {"third": None}}, "name pattern: expected one that matches a layer: 'first', "),
        ({"options": {"first": 0.5}}, "options['first']: expected a dict of options, or None, got 0.5"),
        ({"options": ["first"]}, "options: expected a mapping from name patterns to dicts of options or None"),
        ({"filter_fn": lambda *_: False}, "sparsify_: expected a model with layers to gate, got 'MLP'"),
        ({"block_size": 512}, "first (Linear): too small to pay: 1x1 blocks"),
    ],
)
def test_a_mistake_changes_nothing(arguments, message):
    model = MLP()
    before = list(model.modules())
    with raises_blockgate(message, ValueError):
        convert(model, **arguments)
    assert list(model.modules()) == before


class FullyShardedDataParallel(nn.Sequential):
    """Stands in for torch's, which needs a process group."""


def test_what_is_no_model_of_layers_is_refused():
    with raises_blockgate("use DynamicSparseLinear.from_dense(layer)"):
        convert(nn.Linear(32, 32))
    with raises_blockgate("use DynamicSparseQRNN.from_dense(layer)"):
        convert(bg.layers.QRNN(32, 32))
    with raises_blockgate("use DynamicSparseLinear.from_dense(layer)"):
        convert(torch.compile(nn.Linear(32, 32)))
    with raises_blockgate("sparsify_: expected an nn.Module, got 'NoneType'"):
        convert(None)
    with raises_blockgate("sparsify_: expected a model that is not yet wrapped, got 'FullyShardedDataParallel'"):
        convert(nn.Sequential(FullyShardedDataParallel(nn.Linear(32, 32))))
    with raises_blockgate("sparsify_: expected a model with layers to gate, got 'ReLU'"):
        convert(nn.ReLU())
