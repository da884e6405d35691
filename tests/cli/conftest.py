"""A run that the tests of the command line share."""

from __future__ import annotations

import json

import pytest

from blockgate.cli import main
from blockgate.lab.training.config import run_to_plain
from tests.corpora import tiny_text_run, write_texts


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A config file, and the run that `blockgate train` made of it."""
    folder = tmp_path_factory.mktemp("cli")
    run = tiny_text_run(write_texts(folder / "texts", train=500, other=100), folder / "run")
    (folder / "tiny.json").write_text(json.dumps(run_to_plain(run)))
    options = "--epochs 1 --model.gate.sparsity 0.75 --model.gate.gate eq1"
    assert main(["train", str(folder / "tiny.json"), *options.split()]) == 0
    return folder
