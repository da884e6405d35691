"""The arms of each experiment: which models are compared, and the run that trains each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from blockgate.errors import invalid
from blockgate.lab.models import LanguageModel, LanguageModelConfig, count_costs, small_dense
from blockgate.lab.reproduce.ablations import ABLATIONS, DENSE_CHANGES, IMAGE_ABLATIONS, PRUNED_CHANGES
from blockgate.lab.training.config import LanguageModelRun, PruningConfig, RampConfig, Run

__all__ = ["DYNAMIC", "EXPERIMENTS", "KINDS", "SCALES", "Arm", "arms_of", "choose_arms", "run_of"]

SCALES = ("tiny", "laptop", "paper")

# The kinds of arms, and what tables call them.
KINDS = {
    "dense": "dense",
    "dynamic": "dynamic, Eq. 1",
    "dynamic-best": "dynamic, rms + per row",
    "dynamic-slow": "dynamic, rms + per row, slow gates",
    "agp": "magnitude pruning (AGP)",
    "block-agp": "AGP of whole blocks",
    "static": "static blocks",
    "small": "small dense of equal MACs",
}
# Dropout that serves one kind harms another, so each may go without: kinds with this at their end.
NO_DROPOUT = "-no-dropout"
KINDS |= {f"{kind}{NO_DROPOUT}": f"{label}, no dropout" for kind, label in KINDS.items()}
KINDS |= {name: ablation.label for name, ablation in (ABLATIONS | DENSE_CHANGES | PRUNED_CHANGES).items()}
DYNAMIC = {
    "dynamic": {"normalise": "mean", "select": "global"},
    "dynamic-best": {"normalise": "rms", "select": "per_row"},
    "dynamic-slow": {"normalise": "rms", "select": "per_row"},
}
# What slow gates learn at, as a share of the learning rate: more of them depend on the input then.
SLOW_GATE_RATE = 0.3

# The paper prunes every 3 epochs between 1 and 25 of 55; other runs at the same shares of their epochs.
AGP_BEGIN, AGP_END, AGP_EVERY, AGP_EPOCHS = 1, 25, 3, 55


@dataclass(frozen=True, slots=True)
class Arm:
    """One model of a comparison.

    Args:
        task: what it is trained on; configs are named `<task>-<scale>`.
        kind: one of KINDS.
        percent: its sparsity; None for the dense one.
    """

    task: str
    kind: str
    percent: int | None = None

    @property
    def name(self) -> str:
        """Of the arm and its folder, such as ptb-lstm-agp-90."""
        return "-".join([self.task, self.kind, *([] if self.percent is None else [str(self.percent)])])

    @property
    def family(self) -> str:
        """Its kind, with dropout or without."""
        return self.kind.removesuffix(NO_DROPOUT)

    @property
    def label(self) -> str:
        """What tables call it."""
        return KINDS[self.kind]

    @property
    def sparsity(self) -> float:
        """The share that is asked for."""
        return (self.percent or 0) / 100


def _compared(task: str, percents: Sequence[int], *kinds: str) -> list[Arm]:
    return [Arm(task, kind, percent) for kind in kinds for percent in percents]


def _mnist(scale: str) -> list[Arm]:  # noqa: ARG001
    return [Arm("mnist", "dense"), *_compared("mnist", [90], "dynamic", "dynamic-best")]


def _table1(scale: str) -> list[Arm]:
    percents = [50, 60, 80, 90] if scale == "paper" else [50, 80, 90]
    arms = [Arm("ptb-qrnn", "dense"), *_compared("ptb-qrnn", percents, "dynamic", "dynamic-best", "small")]
    return arms + _without_dropout("ptb-qrnn", scale, percents, "dynamic-best", "dynamic-slow", "small")


def _table2(scale: str) -> list[Arm]:
    return [
        arm
        for task in ("ptb-lstm", "wikitext-2-lstm")
        for arm in (
            Arm(task, "dense"),
            *_compared(task, [50, 75, 90], "dynamic", "dynamic-best"),
            Arm(task, "dynamic-slow", 50),
            *_compared(task, [50, 75, 90], "agp"),
            Arm(task, "block-agp", 90),
            Arm(task, "static", 50),
            *_compared(task, [50, 75, 90], "small"),
            *_without_dropout(task, scale, [50, 75, 90], "dynamic", "dynamic-best", "dynamic-slow", "agp", "small"),
        )
    ]


def _without_dropout(task: str, scale: str, percents: Sequence[int], *kinds: str) -> list[Arm]:
    """At the paper's scale the dropouts are the paper's."""
    if scale == "paper":
        return []
    return [Arm(task, f"dense{NO_DROPOUT}"), *_compared(task, percents, *(f"{kind}{NO_DROPOUT}" for kind in kinds))]


def _wide(scale: str) -> list[Arm]:
    # Layers so wide that there is time to save; those of the paper are.
    task = "ptb-lstm" if scale == "paper" else "ptb-wide"
    arms = [Arm(task, "dense"), *_compared(task, [50, 75, 90], "dynamic-best", "agp", "small")]
    return arms + _without_dropout(task, scale, [50, 75, 90], "dynamic-best", "dynamic-slow", "small")


def _ablations(scale: str) -> list[Arm]:
    # Many arms: where time is short, with a model and a training of their own.
    task = "ptb-lstm" if scale == "paper" else "ptb-ablation"
    return [
        *(Arm(task, kind) for kind in ("dense", f"dense{NO_DROPOUT}", *DENSE_CHANGES)),
        *_compared(task, [75], "agp", f"agp{NO_DROPOUT}", *PRUNED_CHANGES, *ABLATIONS),
    ]


def _mnist_ablations(scale: str) -> list[Arm]:
    task = "mnist" if scale == "paper" else "mnist-ablation"
    return [Arm(task, "dense"), *_compared(task, [90], *IMAGE_ABLATIONS)]


def _figure1(scale: str) -> list[Arm]:
    return [arm for arm in _mnist(scale) if arm.kind in DYNAMIC]


def _figure2(scale: str) -> list[Arm]:
    return [arm for arm in _table1(scale) + _table2(scale) if arm.family in DYNAMIC]


EXPERIMENTS = {
    "mnist": _mnist,
    "table1": _table1,
    "table2": _table2,
    "wide": _wide,
    "figure1": _figure1,
    "figure2": _figure2,
    "ablations": _ablations,
    "mnist-ablations": _mnist_ablations,
}


def arms_of(experiment: str, scale: str) -> list[Arm]:
    """All arms of an experiment, in the order of its table."""
    if experiment not in EXPERIMENTS or scale not in SCALES:
        raise invalid(
            "reproduce",
            expected=f"one of {tuple(EXPERIMENTS)} at a scale of {SCALES}",
            got=f"{experiment} at {scale}",
            remedy="Check the spelling.",
        )
    return EXPERIMENTS[experiment](scale)


def choose_arms(experiment: str, scale: str, patterns: Sequence[str] = ()) -> list[Arm]:
    """The arms whose names fit one of the patterns, such as ptb-lstm-agp-90 or 'ptb-*'; all if there is none."""
    arms = arms_of(experiment, scale)
    for pattern in patterns:
        if not any(fnmatchcase(arm.name, pattern) for arm in arms):
            raise invalid(
                "arms",
                expected=f"names, or patterns of names, of {experiment}: {', '.join(arm.name for arm in arms)}",
                got=pattern,
                remedy="Check the spelling; a pattern needs quotes.",
            )
    return [arm for arm in arms if not patterns or any(fnmatchcase(arm.name, p) for p in patterns)]


def run_of(arm: Arm, base: Any, words: int = 0) -> Run:
    """The run that trains an arm: that of its task, with another kind of matrices and nothing else changed.

    Args:
        arm: which.
        base: the run of its task and scale.
        words: size of the vocabulary; for small dense models, whose width depends on what the head costs.
    """
    if arm.kind.endswith(NO_DROPOUT):
        return run_of(replace(arm, kind=arm.family), replace(base, model=replace(base.model, dropout=0.0)), words)
    made: Run = replace(base, model=replace(base.model, matrices="dense"), ramp=RampConfig())
    if arm.kind in DYNAMIC:
        made = replace(base, model=_dynamic(arm, base.model, arm.kind))
        if arm.kind == "dynamic-slow":
            made = replace(made, optimizer=replace(made.optimizer, gate_lr=SLOW_GATE_RATE * made.optimizer.lr))
    elif arm.kind in ABLATIONS:
        gated = replace(base, model=replace(base.model, gate=replace(base.model.gate, sparsity=arm.sparsity)))
        made = ABLATIONS[arm.kind].change(gated)
    elif arm.kind in DENSE_CHANGES:
        made = DENSE_CHANGES[arm.kind].change(made)
    elif arm.kind in {"agp", "block-agp"} | PRUNED_CHANGES.keys():
        share = base.epochs / AGP_EPOCHS
        pruning = PruningConfig(
            sparsity=arm.sparsity,
            begin=AGP_BEGIN * share,
            end=AGP_END * share,
            every=AGP_EVERY * share,
            block_size=base.model.gate.block_size if arm.kind == "block-agp" else None,
        )
        made = replace(made, pruning=pruning)
        if arm.kind in PRUNED_CHANGES:
            made = PRUNED_CHANGES[arm.kind].change(made)
    elif arm.kind == "static":
        gate = replace(base.model.gate, sparsity=arm.sparsity)
        made = replace(made, model=replace(base.model, matrices="static", gate=gate))  # type: ignore[call-arg]
    elif arm.kind == "small":
        assert isinstance(made, LanguageModelRun)
        made = replace(made, model=small_dense(made.model, words, _macs_of_dynamic(arm, base.model, words)))
    return made


def _dynamic(arm: Arm, model: Any, kind: str) -> Any:
    return replace(model, matrices="dynamic", gate=replace(model.gate, sparsity=arm.sparsity, **DYNAMIC[kind]))


def _macs_of_dynamic(arm: Arm, model: LanguageModelConfig, words: int) -> float:
    """What the dearest of the dynamic models of this sparsity costs: rounding to whole blocks differs."""
    with torch.device("meta"):
        return max(count_costs(LanguageModel(_dynamic(arm, model, kind), words)).macs for kind in DYNAMIC)
