"""A Quasi-RNN of four layers, regularised as in the paper's Table 1, but of a width that a CPU trains in hours."""

from __future__ import annotations

from blockgate.lab.reproduce.arms import Arm, at_sparsities
from blockgate.lab.reproduce.experiment import Experiment

__all__ = ["EXPERIMENT"]


def _arms(scale: str) -> list[Arm]:
    task = "ptb-qrnn" if scale == "paper" else "ptb-qrnn-medium"
    return [
        Arm(task, "dense"),
        *at_sparsities(task, (50, 60, 80, 90), "margin"),
        *at_sparsities(task, (60, 80, 90), "small-margin"),
    ]


EXPERIMENT = Experiment(
    name="medium-qrnn",
    about="a Quasi-RNN of four layers",
    title="Quasi-RNN of four layers",
    arms=_arms,
    levels=(110.0, 100.0, 95.0),
)
