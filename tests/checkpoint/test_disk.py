"""Disks that are full in the middle of a file, processes killed between two files: the old or the new, whole."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.lab.training.checkpoint import load_checkpoint, save_checkpoint

resource = pytest.importorskip("resource", reason="limits and signals of POSIX")


@contextlib.contextmanager
def files_of_at_most(size):
    """No file may grow past so many bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def model(fill):
    made = nn.Sequential(nn.Linear(64, 64))
    bg.sparsify_(made, block_size=16, filter_fn=lambda *_: True)
    nn.init.constant_(made[0].bias, fill)
    return made


def pretrained(folder, fill):
    bg.save_pretrained(model(fill), folder)


def training(folder, fill):
    save_checkpoint(folder / "last.pt", {"run": {}, "model": {"bias": torch.full((10_000,), float(fill))}})


def distilled(folder, fill):
    batches = [torch.full((4, 64), float(fill))]
    (folder / "run.pt").rename(folder / "kept.pt") if fill == 2 else None
    bg.distil(model(fill), nn.Linear(64, 64), batches, steps=1, checkpoint=folder / "run.pt")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("limit", [0, 1, 4096, 12_000])
@pytest.mark.parametrize("write", [pretrained, training, distilled])
def test_a_disk_that_is_full_in_the_middle(write, limit, tmp_path):
    """Writing itself fails, at the first byte or later: the system's error, the old files, and nothing beside."""
    write(tmp_path, 1)
    before = contents(tmp_path)
    with files_of_at_most(limit), pytest.raises(OSError, match="File too large"):
        write(tmp_path, 2)
    if write is distilled:
        before = {"kept.pt": before["run.pt"]}
    assert contents(tmp_path) == before
    if write is training:
        assert torch.equal(load_checkpoint(tmp_path / "last.pt")["model"]["bias"], torch.ones(10_000))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is read-only for the superuser")
@pytest.mark.parametrize("write", [pretrained, training])
def test_a_folder_that_is_read_only(write, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder, 1)
    before = contents(folder)
    folder.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            write(folder, 2)
    finally:
        folder.chmod(0o700)
    assert contents(folder) == before


KILLED = """
import os, signal, sys
from blockgate.checkpoint import atomic
from tests.checkpoint.test_disk import pretrained
whole, calls = os.replace, []
def replace(*paths):
    calls.append(paths)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    whole(*paths)
atomic.os.replace = replace
pretrained(sys.argv[1], 2)
"""


def test_killed_between_weights_and_config(tmp_path):
    """The config that the killed process had ready still belongs to the weights: the new model loads, whole."""
    pretrained(tmp_path, 1)
    ran = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert len(contents(tmp_path)) == 3
    loaded = bg.load_pretrained(tmp_path, nn.Sequential(nn.Linear(64, 64)))
    assert bool((loaded[0].bias == 2).all())
    pretrained(tmp_path, 3)
    assert sorted(contents(tmp_path)) == ["config.json", "model.safetensors"]
    loaded = bg.load_pretrained(tmp_path, nn.Sequential(nn.Linear(64, 64)))
    assert bool((loaded[0].bias == 3).all())
