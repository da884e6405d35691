"""The paper's Table 2: LSTMs on the Penn Treebank and WikiText-2."""

from __future__ import annotations

from blockgate.lab.reproduce.arms import Arm, at_sparsities, without_dropout
from blockgate.lab.reproduce.experiment import Experiment

__all__ = ["EXPERIMENT"]

TASKS = ("ptb-lstm", "wikitext-2-lstm")
PERCENTS = (50, 75, 90)


def _arms(scale: str) -> list[Arm]:
    return [arm for task in TASKS for arm in _arms_of_task(task, scale)]


def _arms_of_task(task: str, scale: str) -> list[Arm]:
    return [
        Arm(task, "dense"),
        *at_sparsities(task, PERCENTS, "dynamic", "dynamic-best"),
        Arm(task, "dynamic-slow", 50),
        *at_sparsities(task, PERCENTS, "agp"),
        Arm(task, "block-agp", 90),
        Arm(task, "static", 50),
        *at_sparsities(task, PERCENTS, "small"),
        *without_dropout(task, scale, PERCENTS, "dynamic", "dynamic-best", "dynamic-slow", "agp", "margin", "small"),
    ]


EXPERIMENT = Experiment(
    name="table2",
    about="LSTM",
    title="Table 2: LSTM",
    arms=_arms,
    paper={
        "ptb-lstm-dense": 78.57,
        "ptb-lstm-dynamic-50": 78.50,
        "ptb-lstm-dynamic-75": 79.12,
        "ptb-lstm-dynamic-90": 80.34,
        "ptb-lstm-agp-50": 80.92,
        "ptb-lstm-agp-75": 81.06,
        "ptb-lstm-agp-90": 81.75,
        "wikitext-2-lstm-dense": 85.0,
        "wikitext-2-lstm-dynamic-50": 85.31,
        "wikitext-2-lstm-dynamic-75": 86.76,
        "wikitext-2-lstm-dynamic-90": 88.44,
        "wikitext-2-lstm-agp-50": 86.91,
        "wikitext-2-lstm-agp-75": 88.45,
        "wikitext-2-lstm-agp-90": 89.48,
    },
)
