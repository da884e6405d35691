"""Files from strangers: every fault is one error of ours, and nothing is made that the file can't fill."""

from __future__ import annotations

import hashlib
import json
import os
import random

import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.checkpoint import atomic
from blockgate.errors import BlockgateError
from blockgate.layers.qrnn import QRNN
from tests.helpers import raises_blockgate

MODELS = {
    "linear": lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)),
    "lstm": lambda: nn.ModuleDict({"lstm": nn.LSTM(8, 8, 2), "cell": nn.LSTMCell(8, 8)}),
    "qrnn": lambda: nn.ModuleDict({"qrnn": QRNN(8, 8, 2)}),
}


def save(folder, kind="linear", **options):
    model = MODELS[kind]()
    bg.sparsify_(model, block_size=4, filter_fn=lambda *_: True, **options)
    bg.save_pretrained(model, folder)
    return json.loads((folder / "config.json").read_text())


def write_weights(folder, data):
    """Other bytes for the weights, with the digest that fits them."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "model.safetensors").write_bytes(data)
    config["weights_sha256"] = hashlib.sha256(data).hexdigest()
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("data", [b"", b"\xff" * 64, b"\x10\0\0\0\0\0\0\0{}", b"\x02\0\0\0\0\0\0\0[]"])
def test_weights_that_are_none(tmp_path, data):
    save(tmp_path)
    write_weights(tmp_path, data)
    with raises_blockgate("tensors as safetensors stores them"):
        bg.load_pretrained(tmp_path, MODELS["linear"]())


def test_json_that_is_too_deep(tmp_path):
    save(tmp_path)
    (tmp_path / "config.json").write_text("[" * 200_000)
    with raises_blockgate("expected JSON"):
        bg.load_pretrained(tmp_path, MODELS["linear"]())


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("option", [{"gate_hidden": 10**9}, {"gate_hidden": 2**40}, {"block_size": [1, 1]}])
def test_nothing_is_made_that_the_file_cannot_fill(tmp_path, kind, option, monkeypatch):
    config = save(tmp_path, kind)
    for entry in config["layers"].values():
        entry["options"] |= option
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = []
    whole = torch.empty

    def watched(*size, **kwargs):
        made.append(0 if str(kwargs.get("device")) == "meta" else whole(*size, **kwargs | {"device": "meta"}).numel())
        return whole(*size, **kwargs)

    monkeypatch.setattr(torch, "empty", watched)
    model = MODELS[kind]()
    made.clear()
    with raises_blockgate("the tensors of this model"):
        bg.load_pretrained(tmp_path, model)
    assert max(made, default=0) < 10_000


ODD = [None, True, -1, 0, 1.5, 10**30, "", "x", [], [[]], {}, {"a": {}}, [1, 2, 3], "1" * 1000, float("nan")]


@pytest.mark.parametrize("kind", MODELS)
def test_odd_configs_are_refused_or_harmless(tmp_path, kind):
    """Values of other types and sizes in every place of a config."""
    config = save(tmp_path, kind)
    choose, refused = random.Random(0), 0
    for _ in range(250):
        changed = json.loads(json.dumps(config))
        place = changed
        while True:
            key = choose.choice(list(place))
            if isinstance(place[key], dict) and place[key] and choose.random() < 0.8:
                place = place[key]
            else:
                break
        if choose.random() < 0.2:
            del place[key]
        else:
            place[key] = choose.choice(ODD)
        (tmp_path / "config.json").write_text(json.dumps(changed))
        try:
            bg.load_pretrained(tmp_path, MODELS[kind]())
        except BlockgateError:
            refused += 1
    assert refused > 100


def test_what_killed_processes_left_is_removed(tmp_path):
    alive = tmp_path / f".last.pt.{os.getpid()}"
    for name in (".last.pt.99999999", ".best.pt.99999999", ".last.pt.backup", ".last.pt.99999999999999999999"):
        (tmp_path / name).write_text("half")
    alive.write_text("half")
    atomic.write_whole(tmp_path / "last.pt", "whole")
    assert {p.name for p in tmp_path.iterdir()} == {"last.pt", ".best.pt.99999999", ".last.pt.backup"}
    alive.write_text("half")
    atomic.remove_leftovers(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"last.pt", ".last.pt.backup", alive.name}


@pytest.mark.parametrize("code", [28, 30], ids=["full disk", "read-only disk"])
def test_a_disk_that_takes_nothing(tmp_path, monkeypatch, code):
    """The old checkpoint stays, nothing is left behind, and the error is the system's own."""
    save(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(atomic.os, name, refuse)
            with pytest.raises(OSError, match=os.strerror(code)):
                save(tmp_path)
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
