"""Two processes learn what one does from the same batches, and any precision that the machine has can be asked for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from blockgate.lab.training import train
from blockgate.lab.training.checkpoint import load_checkpoint
from blockgate.lab.training.config import RampConfig, run_to_plain
from tests.corpora import tiny_image_run, tiny_text_run, write_images, write_texts


def train_in_processes(run, folder, *options):
    """`blockgate train` in new processes; returns the result of the first."""
    config = folder / f"{run.output.name}.json"
    config.write_text(json.dumps(run_to_plain(run)))
    command = [sys.executable, "-m", "blockgate", "train", str(config), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ, timeout=120)


def undropped(run):
    """In double precision, so that rounding opens no other gate; and nothing dropped, as each process would."""
    model = replace(run.model, word_dropout=0.0, dropout=0.0, weight_dropout=0.0, zoneout=0.0)
    return replace(run, model=model, precision="64-true")


def assert_same_weights(one, two):
    a, b = (load_checkpoint(folder / "last.pt") for folder in (one, two))
    assert a["training"]["updates"] == b["training"]["updates"]
    # Not closer: Fabric hands losses and carried states back in float32, whatever the model computes in.
    for name, weight in a["model"].items():
        torch.testing.assert_close(b["model"][name], weight, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    valid = [state["training"]["rows"][-1]["valid_loss"] for state in (a, b)]
    assert valid[0] == pytest.approx(valid[1], rel=1e-6)
    assert len(b["training"]["processes"]) == 2


def test_two_processes_learn_a_language_as_one(tmp_path):
    texts = write_texts(tmp_path / "texts", train=500, other=101)
    run = undropped(tiny_text_run(texts, tmp_path / "one", epochs=1, ramp=RampConfig(end=1, every="update")))
    train(run, quiet=True)
    result = train_in_processes(replace(run, output=tmp_path / "two"), tmp_path, "--devices", "2")
    assert result.returncode == 0, result.stderr
    assert_same_weights(tmp_path / "one", tmp_path / "two")
    assert result.stderr.count("epoch 1 ") == 1


def test_two_processes_learn_images_as_one_with_uneven_batches(tmp_path):
    # 159 images in batches of 14: the last has 5, of which one process takes 3 and the other 2.
    images = write_images(tmp_path / "images", train=200, test=61)
    options = {"batch_size": 14, "eval_batch_size": 12, "valid_size": 41, "precision": "64-true"}
    run = tiny_image_run(images, tmp_path / "one", **options)
    train(run, quiet=True)
    result = train_in_processes(replace(run, output=tmp_path / "two"), tmp_path, "--devices", "2")
    assert result.returncode == 0, result.stderr
    assert_same_weights(tmp_path / "one", tmp_path / "two")


def test_bfloat16_runs_where_the_machine_can(tmp_path):
    texts = write_texts(tmp_path / "texts", train=300, other=100)
    run = tiny_text_run(texts, tmp_path / "run", epochs=1)
    # In a process of its own: on machines that only pretend, torch's product dies of an illegal instruction.
    result = train_in_processes(run, tmp_path, "--precision", "bf16-mixed")
    if result.returncode == -signal.SIGILL:
        pytest.skip("this machine has no bfloat16 product")
    assert result.returncode == 0, result.stderr
    state = load_checkpoint(run.output / "last.pt")
    assert state["model"]["embedding.weight"].dtype == torch.float32
