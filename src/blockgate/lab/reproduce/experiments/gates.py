"""Gates that stay alive: rules and remedies between a static mask, which never chooses, and an oracle, which knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from blockgate.lab.reproduce.arms import NO_DROPOUT, Arm, at_sparsities
from blockgate.lab.reproduce.experiment import Experiment
from blockgate.lab.reproduce.kinds import KINDS, SLOW_GATE_RATE, Kind, dense_run, pack_blocks, square
from blockgate.lab.reproduce.merit import draw_widths, find_merits, merit_section
from blockgate.lab.reproduce.use import draw_use
from blockgate.lab.training.config import PruningConfig
from blockgate.spec import GateSpec

__all__ = ["CONTROLS", "EXPERIMENT", "GATES", "thin"]

# Blocks are so many times as tall, and as thin, as square ones of the same area.
STRETCH = 4

# LSTMs of 2 x 384 and 2 x 768 beside the 2 x 192 of ptb-lstm, with as many blocks a row.
WIDER = ("ptb-384", "ptb-wide")

# How often in an epoch a static mask is chosen again while the ramp rises.
MASKS_PER_EPOCH = 20


def thin(gate: GateSpec) -> GateSpec:
    """The same gate with tall and thin blocks of the same area."""
    height, width = square(gate).block_size  # type: ignore[misc]
    return replace(gate, block_size=(STRETCH * height, max(1, width // STRETCH)))


def _gated_run(
    base: Any,
    sparsity: float,
    words: int = 0,  # noqa: ARG001
    *,
    shape: Callable[[GateSpec], GateSpec] = thin,
    slow: bool = False,
    revive: float = 0.0,
    **options: Any,
) -> Any:
    """Gated matrices, with options of the gate in the place of the config's."""
    gate = replace(shape(base.model.gate), sparsity=sparsity, normalise=None, **options)
    rate = SLOW_GATE_RATE * base.optimizer.lr if slow else base.optimizer.gate_lr
    optimizer = replace(base.optimizer, gate_lr=rate, revive=revive)
    return replace(base, model=replace(base.model, matrices="dynamic", gate=gate), optimizer=optimizer)


def _masked_run(base: Any, sparsity: float, words: int = 0) -> Any:  # noqa: ARG001
    """The blocks of least magnitude are closed for good, one after the other, while gates would have their ramp."""
    every, gate = 1 / MASKS_PER_EPOCH, thin(base.model.gate)
    pruning = PruningConfig(
        sparsity=sparsity,
        initial=0.0,
        begin=every,
        end=max(every, base.ramp.end),
        every=every,
        block_size=gate.block_size,
    )
    return replace(dense_run(base), model=replace(base.model, matrices="dense", gate=gate), pruning=pruning)


def _random_run(base: Any, sparsity: float, words: int = 0) -> Any:  # noqa: ARG001
    gate = replace(thin(base.model.gate), sparsity=sparsity)
    return replace(dense_run(base), model=replace(base.model, matrices="random", gate=gate))


CONTROLS = {
    "mask": Kind(label="static mask by magnitude", run=_masked_run, look=("#009E73", "p"), pack=pack_blocks),
    "random": Kind(label="static random mask", run=_random_run),
    "oracle": Kind(label="oracle", run=partial(_gated_run, gate="oracle", key_size="auto", gate_hidden=None)),
}

# What the bias of a block that no word opens rises by, as a share of the gates' learning rate.
REVIVE, GENTLE = 0.3, 0.1

GATES = {
    "topk-thin": Kind(label="topk, thin blocks", run=partial(_gated_run, gate="topk")),
    "margin-square": Kind(
        label="margin, revived, square blocks",
        run=partial(_gated_run, shape=square, gate="margin", revive=REVIVE),
    ),
    "margin-left": Kind(label="margin, thin blocks, dead ones left alone", run=partial(_gated_run, gate="margin")),
    "margin-slow": Kind(
        label="margin, revived, thin blocks, slow gates",
        run=partial(_gated_run, gate="margin", revive=REVIVE, slow=True),
    ),
    "margin-gentle": Kind(
        label="margin, gently revived, thin blocks",
        run=partial(_gated_run, gate="margin", revive=GENTLE),
    ),
    "margin": Kind(
        label="margin, revived, thin blocks",
        run=partial(_gated_run, gate="margin", revive=REVIVE),
        look=("#D55E00", "*"),
    ),
}
KINDS.update(CONTROLS | {name: replace(kind, is_dynamic=True) for name, kind in GATES.items()})

# In pictures: the former default and the present one.
COMPARED = ("dynamic-best", "margin")


def _more(arms: Sequence[Arm], results: dict[str, list[dict[str, Any]]], folder: Path) -> str:
    """The figure of merit, by width too, and a picture of the use of blocks for each task."""
    shown = [arm for arm in arms if arm.family in COMPARED]
    for task in dict.fromkeys(arm.task for arm in arms):
        draw_use([arm for arm in shown if arm.task == task], results, folder / f"use-{task}.png")
    merits = find_merits(arms, results, ("dynamic-best", *GATES))
    draw_widths([merit for merit in merits if merit.arm in shown], folder / "merit-by-width.png")
    return merit_section(merits)


def _arms(scale: str) -> list[Arm]:
    # Without dropout, as gates want it: at the paper's scale it belongs to the task.
    end = "" if scale == "paper" else NO_DROPOUT
    kinds = [f"{kind}{end}" for kind in (*CONTROLS, "dynamic-best", *GATES)]
    return [
        arm
        for task in ("ptb-qrnn", "ptb-lstm", *(() if scale == "paper" else WIDER))
        for arm in (Arm(task, f"dense{end}"), *at_sparsities(task, (50, 90), *kinds))
    ]


EXPERIMENT = Experiment(
    name="gates",
    about="which gates stay alive, between a static mask and an oracle",
    title="Gates that stay alive",
    arms=_arms,
    more=_more,
)
