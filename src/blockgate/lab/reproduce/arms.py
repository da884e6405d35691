"""Arms: the models of a comparison, each one with a name, a kind and a run that trains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blockgate.errors import invalid
from blockgate.lab.reproduce.kinds import KINDS, Kind
from blockgate.lab.training.config import Run

__all__ = ["NO_DROPOUT", "Arm", "at_sparsities", "check_dropouts", "run_of", "without_dropout"]

# Dropout that serves one kind harms another, so each may go without: kinds with this at their end.
NO_DROPOUT = "-no-dropout"


@dataclass(frozen=True, slots=True)
class Arm:
    """One model of a comparison.

    Args:
        task: what it is trained on; configs are named `<task>-<scale>`.
        kind: one of KINDS, or one of them with NO_DROPOUT at its end.
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
    def facts(self) -> Kind:
        """What is known of its kind."""
        return KINDS[self.family]

    @property
    def label(self) -> str:
        """What tables call it."""
        return self.facts.label + (", no dropout" if self.kind != self.family else "")

    @property
    def sparsity(self) -> float:
        """The share that is asked for."""
        return (self.percent or 0) / 100


def at_sparsities(task: str, percents: Sequence[int], *kinds: str) -> list[Arm]:
    """An arm of each kind at each sparsity."""
    return [Arm(task, kind, percent) for kind in kinds for percent in percents]


def without_dropout(task: str, scale: str, percents: Sequence[int], *kinds: str) -> list[Arm]:
    """The dense arm and those of some kinds, without dropout; none at the paper's scale, whose dropouts are its own."""
    if scale == "paper":
        return []
    return [Arm(task, f"dense{NO_DROPOUT}"), *at_sparsities(task, percents, *(f"{kind}{NO_DROPOUT}" for kind in kinds))]


def check_dropouts(dropouts: Mapping[str, float], arms: Sequence[Arm]) -> None:
    """Raises unless these are shares by the kinds of arms, which belong to language models."""
    kinds = {arm.kind: None for arm in arms if arm.kind == arm.family}
    for kind, share in dropouts.items():
        if kind not in kinds or not 0 <= share < 1:
            raise invalid(
                "--dropout",
                expected=f"shares in [0, 1) of the kinds {', '.join(kinds)}",
                got=f"{kind} {share:g}",
                remedy="Such as --dropout dense 0.5; see --list for the arms.",
            )


def run_of(arm: Arm, base: Any, words: int = 0, dropouts: Mapping[str, float] | None = None) -> Run:
    """The run that trains an arm: that of its task, with what its kind changes and nothing else.

    Args:
        arm: which.
        base: the run of its task and scale.
        words: size of the vocabulary; for small dense models, whose width depends on what the head costs.
        dropouts: those of some kinds, by the name of the kind.
    """
    if dropouts and arm.kind in dropouts:
        base = replace(base, model=replace(base.model, dropout=dropouts[arm.kind]))
    if arm.kind != arm.family:
        base = replace(base, model=replace(base.model, dropout=0.0))
    made: Run = arm.facts.run(base, arm.sparsity, words)
    return made
