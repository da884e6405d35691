"""Data and sizes of the tiny scale: made up on the spot, to see in a minute that everything runs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import torch

from blockgate.checkpoint.atomic import write_whole
from blockgate.lab.training.config import ImageRun, LanguageModelRun, OptimizerConfig, Run
from blockgate.spec import GateSpec

__all__ = ["tiny_run"]

WORDS = 40
CLASSES = 8


def tiny_run(run: Run, folder: Path) -> Run:
    """A run of seconds on made-up data, which are put into `folder`."""
    if isinstance(run, ImageRun):
        net = replace(run.model, hidden_size=64, hidden_layers=2, gate=_small(run.model.gate))
        sgd = OptimizerConfig(lr=0.01, momentum=0.9)
        return replace(
            run, data=str(_images(folder / "images")), epochs=3, batch_size=16, valid_size=100, model=net, optimizer=sgd
        )
    assert isinstance(run, LanguageModelRun)
    model = replace(run.model, embedding_size=16, hidden_size=32, cutoffs=(10,), gate=_small(run.model.gate))
    adam = OptimizerConfig(kind="adam", lr=0.03)
    return replace(
        run, data=str(_texts(folder / "texts")), epochs=3, batch_size=10, bptt=10, model=model, optimizer=adam
    )


def _small(gate: GateSpec) -> GateSpec:
    return replace(gate, block_size=8, key_size=8)


def _texts(folder: Path) -> Path:
    """Texts of a language in which each word has three that may follow."""
    numbers = random.Random(0)
    for part, lines in (("train", 400), ("valid", 60), ("test", 60)):
        word, text = 0, []
        for _ in range(lines):
            line = []
            for _ in range(10):
                word = (word * 7 + numbers.choice((1, 1, 1, 2, 3))) % WORDS
                line.append(f"w{word}")
            text.append(" ".join(line) + "\n")
        _write(folder / f"{part}.txt", "".join(text).encode())
    return folder


def _images(folder: Path) -> Path:
    """Images of 8 x 8 with one bright row, whose number is the label."""
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 600), ("t10k", 200)):
        labels = torch.randint(0, CLASSES, (count,), generator=generator)
        images = torch.randint(0, 60, (count, CLASSES, CLASSES), generator=generator)
        images[torch.arange(count), labels] += 150
        for name, data in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            head = bytes([0, 0, 8, data.dim()]) + b"".join(size.to_bytes(4, "big") for size in data.shape)
            _write(folder / name, head + bytes(data.flatten().tolist()))
    return folder


def _write(file: Path, data: bytes) -> None:
    if not file.is_file() or file.read_bytes() != data:
        write_whole(file, data)
