"""LSTM layers so wide that there is time to save."""

from __future__ import annotations

from blockgate.lab.reproduce.arms import Arm, at_sparsities, without_dropout
from blockgate.lab.reproduce.experiment import Experiment

__all__ = ["EXPERIMENT"]

PERCENTS = (50, 75, 90)


def _arms(scale: str) -> list[Arm]:
    # The paper's own layers are wide.
    task = "ptb-lstm" if scale == "paper" else "ptb-wide"
    return [
        Arm(task, "dense"),
        *at_sparsities(task, PERCENTS, "dynamic-best", "agp", "small"),
        *without_dropout(task, scale, PERCENTS, "dynamic-best", "dynamic-slow", "margin", "small"),
    ]


EXPERIMENT = Experiment(name="wide", about="an LSTM so wide that time is saved", title="Wider LSTM", arms=_arms)
