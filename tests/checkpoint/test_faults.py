"""Bad checkpoints and bad targets: one clear error, and everything stays as it was."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import blockgate as bg
from blockgate.checkpoint.files import write_checkpoint
from tests.helpers import raises_blockgate


def dense(hidden: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(32, hidden), nn.ReLU(), nn.Linear(hidden, 32))


def sparse() -> nn.Module:
    model = dense()
    bg.sparsify_(model, block_size=16)
    return model


@pytest.fixture
def saved(tmp_path):
    bg.save_pretrained(sparse(), tmp_path)
    return tmp_path


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(folder, change):
    """Writes other tensors, with a digest that fits."""
    config = json.loads((folder / "config.json").read_text())
    write_checkpoint(folder, config, change(load_file(folder / "model.safetensors")))


def snapshot(model):
    return list(model.modules()), {key: value.clone() for key, value in model.state_dict().items()}


def assert_untouched(model, before):
    modules, state = before
    assert list(model.modules()) == modules
    assert model.state_dict().keys() == state.keys()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, state[key], rtol=0, atol=0)


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def flip_a_bit(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


def drop(key):
    return lambda tensors: {name: t for name, t in tensors.items() if name != key}


def put(key, tensor):
    return lambda tensors: {**tensors, key: tensor}


def edit_layers(folder, name, **entry):
    layers = json.loads((folder / "config.json").read_text())["layers"]
    change_config(folder, layers={**layers, name: {**layers.get("0"), **entry}})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: (f / "config.json").unlink(),
            "expected a folder with config.json and model.safetensors, got 'no con",
        ),
        (lambda f: (f / "model.safetensors").unlink(), "got 'no model.safetensors'"),
        (shutil.rmtree, "got 'no config.json'"),
        (lambda f: (f / "config.json").write_text("{"), "expected JSON, got"),
        (lambda f: (f / "config.json").write_text("[]"), "expected a checkpoint of blockgate"),
        (lambda f: change_config(f, format="other"), "expected a checkpoint of blockgate"),
        (lambda f: change_config(f, format_version=2), "expected format version 1, got 2. It was written by blockgate"),
        (lambda f: change_config(f, layers=[]), "expected a valid 'layers', got []"),
        (lambda f: change_config(f, ties=None), "expected a valid 'ties', got None"),
        (lambda f: change_config(f, layers={"0": {"class": "x"}}), "expected class and options of layer '0'"),
        (truncate, "expected the file that config.json was written with, got 'another, or a damaged one'"),
        (flip_a_bit, "expected the file that config.json was written with"),
        (lambda f: change_tensors(f, drop("0.gate.bias")), "got '0.gate.bias: not in the checkpoint'"),
        (lambda f: change_tensors(f, put("3.weight", torch.ones(2))), "got '3.weight: not in the model'"),
        (
            lambda f: change_tensors(f, put("2.bias", torch.ones(2))),
            "2.bias: (2,) in the checkpoint, (32,) in the mode",
        ),
        (
            lambda f: change_tensors(f, put("0.gate.sparsity", torch.tensor(1.5))),
            "0.gate.sparsity: expected a sparsity",
        ),
        (
            lambda f: change_config(f, ties={"9.bias": "nothing"}),
            "ties: expected names without a tensor that stand for one",
        ),
        (
            lambda f: change_config(f, ties={"2.bias": "0.bias"}),
            "ties: expected names without a tensor that stand for one",
        ),
        (lambda f: change_config(f, ties={"9.bias": "0.bias"}), "got '9.bias: not in the model'"),
        (
            lambda f: edit_layers(f, "5"),
            "layer '5': expected DynamicSparseLinear or its dense form, as in the checkpoint, ",
        ),
        (
            lambda f: edit_layers(f, "1"),
            "layer '1': expected DynamicSparseLinear or its dense form, as in the checkpoint, ",
        ),
        (lambda f: edit_layers(f, "0", **{"class": "os.system"}), "layer '0': expected os.system or its dense form"),
        (
            lambda f: edit_layers(f, "0", options={"block_size": 0}),
            "layer '0': block_size (out): expected a positive int",
        ),
        (lambda f: edit_layers(f, "0", options={"wrong": 0}), "layer '0': "),
    ],
)
def test_a_bad_checkpoint_touches_no_model(saved, damage, message):
    damage(saved)
    model = dense()
    before = snapshot(model)
    with pytest.raises(bg.errors.InvalidInputError) as caught:
        bg.load_pretrained(saved, model)
    assert message in str(caught.value)
    assert_untouched(model, before)


def test_models_that_do_not_fit_are_untouched(saved):
    model = dense(hidden=48)
    before = snapshot(model)
    with raises_blockgate("0.weight: (64, 32) in the checkpoint, (48, 32) in the model; "):
        bg.load_pretrained(saved, model)
    assert_untouched(model, before)
    other = dense()
    bg.sparsify_(other, block_size=8)
    before = snapshot(other)
    with raises_blockgate("layer '0': expected the options of the checkpoint, GateSpec(block_size=(16, 16), "):
        bg.load_pretrained(saved, other)
    assert_untouched(other, before)
    hooked = dense()
    hooked[0].register_forward_hook(lambda *_: None)
    with raises_blockgate("got 'has hooks, as pruned layers have: remove them first'"):
        bg.load_pretrained(saved, hooked)


def test_what_is_no_model(saved):
    with raises_blockgate("model: expected the dense model, or a function that makes it: the checkpoint names none"):
        bg.load_pretrained(saved)
    with raises_blockgate("model: expected an nn.Module or a function that makes one, got 'int'"):
        bg.load_pretrained(saved, 3)
    with raises_blockgate("model: expected an nn.Module or a function that makes one, got 'int'"):
        bg.load_pretrained(saved, lambda: 3)
    with raises_blockgate("save_pretrained: expected an nn.Module, got 'int'"):
        bg.save_pretrained(3, saved)


class WithExtra(nn.Linear):
    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bg.pack(sparse()), "save_pretrained: expected a model that is not packed, got 'packed layers'"),
        (
            lambda: sparse().to("meta"),
            "state_dict()['0.weight']: expected a dense tensor with values, got 'torch.strided",
        ),
        (lambda: WithExtra(2, 2), "state_dict()['_extra_state']: expected a dense tensor with values, got 'dict'"),
    ],
)
def test_what_cannot_be_saved_leaves_the_old_checkpoint(saved, make, message):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with raises_blockgate(message):
        bg.save_pretrained(make(), saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


def test_a_failing_disk_leaves_the_old_checkpoint(saved, monkeypatch):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def full(*_args, **_options):
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="no space left"):
        bg.save_pretrained(sparse(), saved)
    monkeypatch.undo()
    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(OSError, match="no space left"):
        bg.save_pretrained(sparse(), saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


def test_folders_of_another_make_are_not_overwritten(tmp_path):
    for text in ('{"model_type": "gpt2"}', "not json", "[]"):
        (tmp_path / "config.json").write_text(text)
        with raises_blockgate("directory: expected no config.json from another program"):
            bg.save_pretrained(sparse(), tmp_path)
        assert (tmp_path / "config.json").read_text() == text
        assert not (tmp_path / "model.safetensors").exists()
    with raises_blockgate("directory: expected a folder"):
        bg.save_pretrained(sparse(), tmp_path / "config.json")


def test_saving_again_replaces_the_checkpoint(saved):
    model = sparse()
    bg.save_pretrained(model, saved)
    x = torch.randn(2, 32)
    torch.testing.assert_close(bg.load_pretrained(saved, dense())(x), model(x), rtol=0, atol=0)
    assert len(list(saved.iterdir())) == 2


def test_the_package_that_is_missing_is_named(saved, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    for call in (lambda: bg.load_pretrained(saved, dense()), lambda: bg.save_pretrained(sparse(), saved)):
        with raises_blockgate("pip install 'blockgate[train]'"):
            call()


def test_a_weight_file_of_another_checkpoint_is_refused(saved, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    bg.save_pretrained(sparse(), other)
    save_file(load_file(other / "model.safetensors"), saved / "model.safetensors", metadata={"format": "pt"})
    with raises_blockgate("expected the file that config.json was written with"):
        bg.load_pretrained(saved, dense())


@pytest.mark.parametrize("value", [-1.0, float("nan"), [1.0, 2.0]])
def test_a_temperature_that_none_can_have(tmp_path, value):
    model = dense()
    bg.sparsify_(model, block_size=16, gate="softmax_sum")
    bg.save_pretrained(model, tmp_path)
    change_tensors(tmp_path, put("0.gate.temperature", torch.tensor(value)))
    other = dense()
    before = snapshot(other)
    with raises_blockgate("0.gate.temperature: "):
        bg.load_pretrained(tmp_path, other)
    assert_untouched(other, before)


def test_other_values_of_gates_may_be_missing(tmp_path):
    model = dense()
    bg.sparsify_(model, block_size=16, gate="softmax_sum")
    bg.save_pretrained(model, tmp_path)
    change_tensors(tmp_path, lambda tensors: {k: v for k, v in tensors.items() if not k.endswith("temperature")})
    loaded = bg.load_pretrained(tmp_path, dense())
    assert loaded[0].gate.temperature == 1.0
    change_tensors(tmp_path, drop("0.gate.sparsity"))
    with raises_blockgate("got '0.gate.sparsity: not in the checkpoint'"):
        bg.load_pretrained(tmp_path, dense())
