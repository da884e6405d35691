"""Runs that are disturbed from outside: signals, kill -9 before the first checkpoint, a clock that is set back."""

from __future__ import annotations

import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from blockgate.lab.training import Hook, train
from blockgate.lab.training.checkpoint import load_checkpoint
from blockgate.lab.training.config import run_to_plain
from tests.corpora import tiny_text_run, write_texts
from tests.lab.training.test_resume import assert_identical, everything


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"), train=700, other=120)


class Raise(Hook):
    """Sends this process a signal after some updates."""

    def __init__(self, number, after):
        self.number, self.left = number, after

    def after_update(self):
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(self.number)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_the_first_signal_saves_a_checkpoint(name, texts, tmp_path):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    run = tiny_text_run(texts, tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        train(run, hooks=[lambda *_: Raise(number, 10)], quiet=True)
    assert load_checkpoint(run.output / "last.pt")["training"]["updates"] == 10
    assert signal.getsignal(number) is before


def test_a_sigterm_that_somebody_handles_stays_theirs(texts, tmp_path):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        train(tiny_text_run(texts, tmp_path / "run", epochs=1), hooks=[lambda *_: Raise(signal.SIGTERM, 3)], quiet=True)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [1]


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_process_that_is_told_to_end_does_so_in_order(texts, tmp_path):
    run = tiny_text_run(texts, tmp_path / "run", epochs=1000, checkpoint_seconds=1e9)
    config = tmp_path / "run.json"
    config.write_text(json.dumps(run_to_plain(run)))
    command = [sys.executable, "-m", "blockgate", "train", str(config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not (run.output / "epochs.csv").exists() and process.poll() is None:
            time.sleep(0.02)
        process.terminate()
        error = process.communicate()[1]
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert load_checkpoint(run.output / "last.pt")["training"]["updates"] > 0


KILLED = """
import os, signal, sys
from pathlib import Path
from blockgate.lab.training import Hook, train
import json
from blockgate.lab.training.config import run_from_plain
class Die(Hook):
    left = 3
    def after_update(self):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
train(run_from_plain(json.loads(Path(sys.argv[1]).read_text())), hooks=[lambda *_: Die()], quiet=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("cell", ["qrnn", "lstm"])
def test_a_run_killed_before_its_first_checkpoint_begins_again(cell, texts, tmp_path):
    run = tiny_text_run(texts, tmp_path / "killed", checkpoint_seconds=1e9)
    run = replace(run, model=replace(run.model, cell=cell))
    config = tmp_path / "run.json"
    config.write_text(json.dumps(run_to_plain(run)))
    ran = subprocess.run([sys.executable, "-c", KILLED, str(config)], capture_output=True, text=True, timeout=200)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert (run.output / "run.json").exists()
    assert not (run.output / "last.pt").exists()
    train(replace(run, resume=True), quiet=True)
    train(replace(run, output=tmp_path / "whole"), quiet=True)
    assert_identical(everything(run.output), everything(tmp_path / "whole"))


def test_a_clock_that_is_set_back_changes_nothing(texts, tmp_path, monkeypatch):
    """Every look at the time of day finds an hour less than the one before."""
    run = tiny_text_run(texts, tmp_path / "run", checkpoint_seconds=0.0)
    train(run, quiet=True)
    hours = itertools.count(2_000_000_000, -3600)
    saved = []
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: float(next(hours)))
        patch.setattr(time, "time_ns", lambda: int(next(hours)) * 10**9)
        patch.setattr("blockgate.lab.training.loop.save_checkpoint", _noting(saved))
        train(replace(run, output=tmp_path / "back"), quiet=True)
    assert next(hours) < 2_000_000_000 - 3600, "nobody asked for the time"
    assert_identical(everything(tmp_path / "back"), everything(run.output))
    updates = load_checkpoint(run.output / "last.pt")["training"]["updates"]
    assert saved.count("last.pt") >= updates
    rows = list(csv.DictReader((tmp_path / "back" / "epochs.csv").read_text().splitlines()))
    assert all(float(row["seconds"]) >= 0 for row in rows)


def _noting(saved):
    from blockgate.lab.training.checkpoint import save_checkpoint

    def save(file, state):
        saved.append(file.name)
        save_checkpoint(file, state)

    return save
