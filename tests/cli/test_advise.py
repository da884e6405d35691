"""`blockgate advise`, with functions and folders."""

from __future__ import annotations

import json

import pytest

from blockgate.cli import main

MODEL = """
import torch
def make():
    return torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 64)), torch.zeros(1, 64)
def wrong():
    return 3
"""


@pytest.fixture
def _here(tmp_path, monkeypatch):
    (tmp_path / "made_here.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.usefixtures("_here")
def test_json(capsys):
    assert main(["advise", "made_here:make", "--json", "--sparsity", "0.5", "--seconds", "0.2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [layer["matrices"] for layer in found["layers"]] == ["512x64", "64x512"]
    assert found["sparsity"] == 0.5


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "PACKAGE.MODULE:FUNCTION"),
        (["made_here:missing"], "missing"),
        (["no_such_module:make"], "no_such_module"),
        (["made_here:wrong"], "a model and an example input"),
        (["made_here:make", "--sparsity", "0.3"], "0.5, 0.75, 0.9"),
    ],
)
def test_mistakes(capsys, words, message):
    assert main(["advise", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_folder_of_transformers(tmp_path, capsys, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = transformers.GPT2Config(n_embd=128, n_layer=1, n_head=2, vocab_size=100, n_positions=16)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    assert main(["advise", str(tmp_path / "model"), "--tokens", "2", "--seconds", "0.3"]) == 0
    assert "transformer.h.0.mlp.c_fc" in capsys.readouterr().out
    assert main(["advise", str(tmp_path)]) == 2
    assert "can load" in capsys.readouterr().err
