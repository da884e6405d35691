"""The paper's Table 1: a Quasi-RNN on the Penn Treebank."""

from __future__ import annotations

from blockgate.lab.reproduce.arms import Arm, at_sparsities, without_dropout
from blockgate.lab.reproduce.experiment import Experiment

__all__ = ["EXPERIMENT"]

TASK = "ptb-qrnn"


def _arms(scale: str) -> list[Arm]:
    percents = [50, 60, 80, 90] if scale == "paper" else [50, 80, 90]
    return [
        Arm(TASK, "dense"),
        *at_sparsities(TASK, percents, "dynamic", "dynamic-best", "small"),
        *without_dropout(TASK, scale, percents, "dynamic-best", "dynamic-slow", "margin", "small"),
    ]


EXPERIMENT = Experiment(
    name="table1",
    about="Quasi-RNN",
    title="Table 1: Quasi-RNN",
    arms=_arms,
    paper={
        "ptb-qrnn-dense": 54.93,
        "ptb-qrnn-dynamic-50": 56.17,
        "ptb-qrnn-dynamic-60": 57.93,
        "ptb-qrnn-dynamic-80": 60.70,
        "ptb-qrnn-dynamic-90": 63.59,
        "ptb-qrnn-small-50": 57.23,
        "ptb-qrnn-small-60": 58.76,
        "ptb-qrnn-small-80": 60.82,
        "ptb-qrnn-small-90": 64.08,
    },
)
