"""All experiments, one file each: a module in this folder that has an EXPERIMENT is known to the command line."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from fnmatch import fnmatchcase

from blockgate.errors import invalid
from blockgate.lab.reproduce.arms import Arm
from blockgate.lab.reproduce.experiment import SCALES, Experiment

__all__ = ["EXPERIMENTS", "PAPER", "arms_of", "choose_arms"]

_MODULES = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]

EXPERIMENTS: dict[str, Experiment] = {module.EXPERIMENT.name: module.EXPERIMENT for module in _MODULES}

# What the paper prints for an arm, whatever table it stands in.
PAPER: dict[str, float] = {arm: number for one in EXPERIMENTS.values() for arm, number in one.paper.items()}


def arms_of(experiment: str, scale: str) -> list[Arm]:
    """All arms of an experiment, in the order of its table."""
    if experiment not in EXPERIMENTS or scale not in SCALES:
        raise invalid(
            "reproduce",
            expected=f"one of {tuple(EXPERIMENTS)} at a scale of {SCALES}",
            got=f"{experiment} at {scale}",
            remedy="Check the spelling.",
        )
    return EXPERIMENTS[experiment].arms(scale)


def choose_arms(experiment: str, scale: str, names: Sequence[str] = ()) -> list[Arm]:
    """The arms of these names, such as ptb-lstm-agp-90 or, with a wildcard, 'ptb-*'; all if there is none."""
    arms = arms_of(experiment, scale)
    for name in names:
        if not any(fnmatchcase(arm.name, name) for arm in arms):
            raise invalid(
                "arms",
                expected=f"names of arms of {experiment}: {', '.join(arm.name for arm in arms)}",
                got=name,
                remedy="Check the spelling; names with a wildcard need quotes.",
            )
    return [arm for arm in arms if not names or any(fnmatchcase(arm.name, name) for name in names)]
