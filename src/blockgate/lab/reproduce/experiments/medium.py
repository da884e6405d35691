"""LSTMs of a published size: the "medium" model of Zaremba et al. (2014), two layers of 650."""

from __future__ import annotations

from blockgate.lab.reproduce.arms import Arm, at_sparsities
from blockgate.lab.reproduce.experiment import Experiment

__all__ = ["EXPERIMENT"]

# The paper's own layers are wider still.
TASKS = {"laptop": ("ptb-medium", "wikitext-2-medium"), "paper": ("ptb-lstm", "wikitext-2-lstm")}


def _arms(scale: str) -> list[Arm]:
    ptb, wikitext = TASKS["paper" if scale == "paper" else "laptop"]
    return [
        Arm(ptb, "dense"),
        *at_sparsities(ptb, (50, 75, 90), "margin"),
        *at_sparsities(ptb, (50, 90), "mask"),
        Arm(ptb, "agp", 90),
        *at_sparsities(ptb, (75, 90), "small-margin"),
        Arm(wikitext, "dense"),
        *at_sparsities(wikitext, (50, 90), "margin"),
    ]


EXPERIMENT = Experiment(
    name="medium",
    about="LSTMs of a published size",
    title="LSTM of a published size",
    arms=_arms,
    # What the main claim stands on is run twice.
    seeds={f"{task}-{kind}": 2 for task in ("ptb-medium", "ptb-lstm") for kind in ("dense", "margin-50")},
    levels=(100.0, 95.0, 90.0),
)
