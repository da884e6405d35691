"""Tiny texts and images that have something to learn in them."""

from __future__ import annotations

import gzip
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from blockgate.lab.models import ImageNetworkConfig, LanguageModelConfig
from blockgate.lab.training.config import ImageRun, LanguageModelRun, OptimizerConfig
from blockgate.spec import GateSpec

WORDS = 40


def write_texts(folder: Path, train: int = 1500, other: int = 300) -> Path:
    """train.txt, valid.txt and test.txt of a language in which each word has three that may follow."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for part, length in (("train", train), ("valid", other), ("test", other)):
        number, words = 0, []
        for _ in range(length):
            number = (number * 7 + rng.choice((1, 1, 1, 2, 3))) % WORDS
            words.append(f"w{number}")
        lines = (" ".join(words[start : start + 10]) for start in range(0, length, 10))
        (folder / f"{part}.txt").write_text("\n".join(lines) + "\n")
    return folder


def write_images(folder: Path, train: int = 200, test: int = 60, *, packed: bool = True) -> Path:
    """Four IDX files: images of 8x8, the label told by which row is bright."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", train), ("t10k", test)):
        labels = torch.randint(0, 8, (count,), generator=generator)
        images = torch.randint(0, 60, (count, 8, 8), generator=generator)
        images[torch.arange(count), labels] += 150
        for name, data in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            header = bytes([0, 0, 8, data.dim()]) + b"".join(size.to_bytes(4, "big") for size in data.shape)
            raw = header + bytes(data.flatten().tolist())
            (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(raw) if packed else raw)
    return folder


def tiny_text_run(texts: Path, output: Path, **options: Any) -> LanguageModelRun:
    """A run of seconds: a gated Quasi-RNN with every kind of dropout, unless told otherwise."""
    model = LanguageModelConfig(
        cell="qrnn",
        matrices="dynamic",
        embedding_size=12,
        hidden_size=16,
        projection=True,
        cutoffs=(10,),
        word_dropout=0.1,
        dropout=0.1,
        weight_dropout=0.1,
        zoneout=0.1,
        gate=GateSpec(block_size=4, sparsity=0.5),
    )
    run = LanguageModelRun(
        data=str(texts),
        output=output,
        model=model,
        epochs=2,
        batch_size=4,
        eval_batch_size=4,
        bptt=10,
        threads=1,
        optimizer=OptimizerConfig(lr=5.0, clip=0.25),
        accelerator="cpu",
    )
    return replace(run, **options)


def tiny_image_run(images: Path, output: Path, **options: Any) -> ImageRun:
    """A run of seconds."""
    run = ImageRun(
        data=str(images),
        output=output,
        model=ImageNetworkConfig(hidden_size=32, hidden_layers=2, gate=GateSpec(block_size=8, sparsity=0.5)),
        epochs=2,
        batch_size=16,
        valid_size=40,
        threads=1,
        optimizer=OptimizerConfig(lr=0.05, momentum=0.9, clip=1.0),
        accelerator="cpu",
    )
    return replace(run, **options)
