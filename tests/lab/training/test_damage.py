"""Checkpoints of runs that were damaged on the disk: refused, whatever bit it was, and nothing good is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from blockgate.checkpoint.states import content_digest
from blockgate.errors import BlockgateError
from blockgate.lab.training.checkpoint import load_checkpoint, save_checkpoint
from tests.helpers import raises_blockgate

STATE = {
    "run": {"task": "language-model", "epochs": 3, "start": None, "seeds": (1, 2)},
    "model": {"weight": torch.randn(16, 16), "half": torch.randn(4).to(torch.bfloat16), "none": torch.zeros(0)},
    "training": {"best": 1.5, "rows": [{"epoch": 1.0}], "done": True},
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    save_checkpoint(tmp_path / "last.pt", STATE)
    assert same(load_checkpoint(tmp_path / "last.pt"), STATE)


def test_no_flipped_bit_gives_other_numbers(tmp_path):
    """Every 7th byte, with a bit that goes round: refused, or without any effect on what is read."""
    file = tmp_path / "last.pt"
    save_checkpoint(file, STATE)
    data, refused = file.read_bytes(), 0
    places = range(0, len(data), 7)
    for at in places:
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        file.write_bytes(damaged)
        try:
            assert same(load_checkpoint(file), STATE), f"bit {at % 8} of byte {at}"
        except BlockgateError:
            refused += 1
    assert refused > len(places) / 4


def test_a_flipped_bit_of_a_weight_is_told(tmp_path):
    file = tmp_path / "last.pt"
    save_checkpoint(file, STATE)
    data = bytearray(file.read_bytes())
    data[data.find(STATE["model"]["weight"].numpy().tobytes()) + 5] ^= 4
    file.write_bytes(data)
    with raises_blockgate("damaged since"):
        load_checkpoint(file)


def test_files_without_a_digest_are_read(tmp_path):
    torch.save({"format": 1} | STATE, tmp_path / "best.pt")
    assert same(load_checkpoint(tmp_path / "best.pt"), STATE)


@pytest.mark.parametrize("change", [("run", {}), ("model", {"weight": torch.zeros(16, 16)}), ("training", [1])])
def test_the_digest_covers_everything(change):
    assert content_digest(STATE) == content_digest(dict(STATE))
    assert content_digest(STATE) != content_digest(STATE | dict([change]))


KILLED = """
import os, signal, sys
from pathlib import Path
from blockgate.checkpoint import atomic
from blockgate.lab.training.checkpoint import save_checkpoint
stage, file = sys.argv[1], Path(sys.argv[2])
def die(*_, **__):
    os.kill(os.getpid(), getattr(signal, sys.argv[3]))
if stage == "before":
    die()
if stage == "written":
    atomic.os.fsync = die
if stage == "renaming":
    atomic.os.replace = die
if stage == "halfway":
    import torch
    whole = torch.save
    def half(state, stream):
        whole(state, stream)
        stream.truncate(stream.tell() // 2)
        die()
    torch.save = half
save_checkpoint(file, {"run": {}, "model": {"new": 1}})
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("stage", "how"),
    [(stage, "SIGKILL") for stage in ("before", "halfway", "written", "renaming", "never")]
    + [(stage, "SIGTERM") for stage in ("halfway", "renaming")],
)
def test_killed_while_writing(tmp_path, stage, how):
    """The old file or the new one, whole; and what was left behind goes with the next writing."""
    file = tmp_path / "last.pt"
    save_checkpoint(file, {"run": {}, "model": {"old": 1}})
    command = [sys.executable, "-c", KILLED, stage, str(file), how]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ran.returncode == (0 if stage == "never" else -getattr(signal, how)), ran.stderr
    assert load_checkpoint(file)["model"] == ({"new": 1} if stage == "never" else {"old": 1})
    assert len(list(tmp_path.iterdir())) == (2 if stage in {"halfway", "written", "renaming"} else 1)
    save_checkpoint(file, {"run": {}, "model": {"next": 1}})
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]
