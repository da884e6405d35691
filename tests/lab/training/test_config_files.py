"""JSON configs: built on one that is shipped, or on defaults, which are then told."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from blockgate.cli import main, parse
from blockgate.lab.training.config import run_to_plain
from blockgate.lab.training.config_files import defaults_taken, load_run, shipped_configs
from tests.corpora import write_texts
from tests.helpers import raises_blockgate


def write(folder, **data):
    file = folder / "mine.json"
    file.write_text(json.dumps(data))
    return file


def test_a_base_gives_what_the_file_leaves_out(tmp_path):
    shipped = shipped_configs()["ptb-lstm-laptop"]
    run = load_run(write(tmp_path, base="ptb-lstm-laptop", data="my-texts", model={"gate": {"sparsity": 0.9}}))
    gate = replace(shipped.model.gate, sparsity=0.9)
    wanted = replace(shipped, data="my-texts", model=replace(shipped.model, gate=gate), output=run.output)
    assert run_to_plain(run) == run_to_plain(wanted)
    assert (run.output.name, run.model.matrices, run.optimizer.kind) == ("mine", "dynamic", "adam")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"base": "nothing"}, "base: expected one of ('mnist-ablation-laptop'"),
        ({"base": 3}, "base: expected one of"),
        ({"base": "mnist-laptop", "task": "language-model"}, "task: expected 'images', as in the base"),
        ({"base": "mnist-laptop", "epoch": 3}, "epoch"),
    ],
)
def test_a_wrong_base_is_one_error(tmp_path, data, message):
    with raises_blockgate(message):
        load_run(write(tmp_path, **data))
    (tmp_path / "list.json").write_text("[1]")
    with raises_blockgate("a JSON object"):
        load_run(tmp_path / "list.json")


def test_defaults_are_told_once_and_only_where_the_file_is_silent(tmp_path):
    file = write(tmp_path, task="language-model", data="my-texts")
    told = defaults_taken(file, load_run(file))
    assert "leaves out model and optimizer" in told
    assert "dense matrices" in told
    assert "sgd, learning rate 1." in told
    assert '"base"' in told
    file = write(tmp_path, task="images", model={"hidden_size": 64})
    assert "leaves out optimizer, so" in defaults_taken(file, load_run(file))
    for whole in ({"base": "mnist-laptop"}, {"task": "images", "model": {}, "optimizer": {}}):
        file = write(tmp_path, **whole)
        assert defaults_taken(file, load_run(file)) == ""


def test_the_command_tells_before_it_trains(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = write_texts(tmp_path / "texts", train=300, other=100)
    small = ["--model.embedding-size", "8", "--model.hidden-size", "8", "--epochs", "1", "--accelerator", "cpu"]
    write(tmp_path, task="language-model", data=str(texts))
    assert main(["train", "mine.json", *small, "--batch-size", "4", "--eval-batch-size", "4"]) == 0
    error = capsys.readouterr().err
    assert "mine.json leaves out model and optimizer, so this run uses dense matrices, 2 layers of 8; sgd" in error
    write(tmp_path, base="ptb-lstm-laptop", data=str(texts))
    assert parse(["train", "mine.json"]).config.model.matrices == "dynamic"
