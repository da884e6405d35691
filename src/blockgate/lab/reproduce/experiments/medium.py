"""LSTMs of a published size: the "medium" model of Zaremba et al. (2014), two layers of 650."""

from __future__ import annotations

from blockgate.lab.reproduce.arms import Arm, at_sparsities
from blockgate.lab.reproduce.experiment import Experiment

__all__ = ["EXPERIMENT"]


def _arms(scale: str) -> list[Arm]:
    # The paper's own layers are wider still.
    task = "ptb-lstm" if scale == "paper" else "ptb-medium"
    return [
        Arm(task, "dense"),
        *at_sparsities(task, (50, 75, 90), "margin"),
        *at_sparsities(task, (50, 90), "mask"),
        Arm(task, "agp", 90),
        *at_sparsities(task, (75, 90), "small"),
    ]


EXPERIMENT = Experiment(
    name="medium",
    about="LSTMs of a published size",
    title="LSTM of a published size",
    arms=_arms,
    levels=(100.0, 95.0, 90.0),
)
