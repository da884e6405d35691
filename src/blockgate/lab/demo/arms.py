"""The three models of the demo: how each is trained, and the curve that its training leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blockgate.checkpoint.atomic import write_whole
from blockgate.gates import Gate
from blockgate.lab.data.python_docs import PYTHON_DOCS, python_docs
from blockgate.lab.models import LanguageModelConfig
from blockgate.lab.training import Hook, LanguageModelRun, Trained, load_trained, train
from blockgate.lab.training.checkpoint import BEST, LAST
from blockgate.lab.training.config import OptimizerConfig, RampConfig, ScheduleConfig
from blockgate.lab.training.tasks import make_task
from blockgate.spec import GateSpec

__all__ = ["ARMS", "CURVE_WORDS", "DemoArm", "TrainedArm", "arm_run", "clear_run", "train_arm"]

# Points of a training curve, and words of validation data for each: enough to see the shape, and cheap.
CURVE_POINTS = 24
CURVE_WORDS = 2000

# Sentences of a quick demo, by part of the text.
QUICK_LINES = {"train": 400, "valid": 40, "test": 120}


@dataclass(frozen=True, slots=True)
class DemoArm:
    """One model of the demo; its sparsity is None if it has no gates."""

    name: str
    label: str
    sparsity: float | None


ARMS = (
    DemoArm("dense", "dense", None),
    DemoArm("dynamic-50", "dynamic, 50%", 0.5),
    DemoArm("dynamic-90", "dynamic, 90%", 0.9),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedArm:
    """An arm with its best model, its results, and its curve: points of updates, epoch, sparsity and perplexity."""

    arm: DemoArm
    trained: Trained
    results: dict[str, Any]
    curve: list[dict[str, float]]


def arm_run(arm: DemoArm, *, output: Path, seed: int, threads: int, quick: bool) -> LanguageModelRun:
    """The run that trains an arm; arms differ in the kind of their matrices, and in nothing else.

    Rows have 24 and 40 blocks: then half the blocks of a row is a whole number of them, and a tenth nearly.
    """
    gate = GateSpec(block_size=(256, 16), sparsity=0.0, key_size=64, gate="margin", select="per_row")
    model = LanguageModelConfig(
        embedding_size=384, hidden_size=640, num_layers=1, projection=True, dropout=0.1, gate=gate
    )
    run = LanguageModelRun(
        data=PYTHON_DOCS,
        output=output,
        model=model,
        epochs=2,
        batch_size=40,
        eval_batch_size=20,
        bptt=35,
        seed=seed,
        threads=threads,
        optimizer=OptimizerConfig(kind="adam", lr=0.003, clip=1.0, revive=0.3),
        schedule=ScheduleConfig(kind="cosine"),
        ramp=RampConfig(begin=0.2, end=1.2, every="update"),
        accelerator="cpu",
    )
    if quick:
        tiny = replace(model, embedding_size=48, hidden_size=48, gate=replace(gate, block_size=(32, 2), key_size=8))
        data = str(_quick_texts(output.parent / "texts"))
        run = replace(run, model=tiny, data=data, epochs=1, ramp=replace(run.ramp, begin=0.1, end=0.6))
    if arm.sparsity is None:
        return replace(run, ramp=RampConfig())
    gated = replace(run.model, matrices="dynamic", gate=replace(run.model.gate, sparsity=arm.sparsity))
    return replace(run, model=gated)


def _quick_texts(folder: Path) -> Path:
    """The first sentences of each part, as a corpus of their own."""
    for part, lines in python_docs().items():
        write_whole(folder / f"{part}.txt", "\n".join(lines[: QUICK_LINES[part]]) + "\n")
    return folder


def train_arm(arm: DemoArm, run: LanguageModelRun, *, notes: dict[str, Any], quiet: bool = False) -> TrainedArm:
    """Trains an arm in the folder of its run, from the start."""
    clear_run(run.output)
    curve: list[dict[str, float]] = []
    results = train(run, hooks=[_curve_hook(run, curve)], notes=notes, quiet=quiet)
    return TrainedArm(arm=arm, trained=load_trained(run.output), results=results, curve=curve)


def clear_run(folder: Path) -> None:
    """Deletes what an earlier run left in its folder, and nothing else."""
    for name in ("run.json", "results.json", "epochs.csv", BEST, LAST):
        (folder / name).unlink(missing_ok=True)
    for file in (folder / "tensorboard").glob("events.out.tfevents.*"):
        file.unlink()


def _curve_hook(run: LanguageModelRun, curve: list[dict[str, float]]) -> Callable[[nn.Module, int], Hook]:
    return lambda model, updates_per_epoch: CurveHook(model, updates_per_epoch, run, curve)


class CurveHook(Hook):
    """Looks every few updates how well the model does on some of the validation data.

    Args:
        model: that is trained.
        updates_per_epoch: how many updates an epoch has.
        run: its config.
        curve: where points go.
    """

    def __init__(
        self, model: nn.Module, updates_per_epoch: int, run: LanguageModelRun, curve: list[dict[str, float]]
    ) -> None:
        self.model, self.curve = model, curve
        self.updates_per_epoch = updates_per_epoch
        self.every = max(1, run.epochs * updates_per_epoch // CURVE_POINTS)
        self.task = make_task(run)
        self.batches = -(-CURVE_WORDS // (run.eval_batch_size * run.bptt))
        self.updates = 0

    @torch.no_grad()
    def after_update(self) -> None:
        """Perhaps a point."""
        self.updates += 1
        if self.updates % self.every:
            return
        self.model.eval()
        sums = self.task.evaluate(self.model, "valid", torch.device("cpu"), self.batches)
        self.model.train()
        gates = (module for module in self.model.modules() if isinstance(module, Gate))
        self.curve.append({
            "updates": self.updates,
            "epoch": self.updates / self.updates_per_epoch,
            "sparsity": next((gate.target_sparsity for gate in gates), 0.0),
            "perplexity": self.task.metrics(sums)["perplexity"],
        })
