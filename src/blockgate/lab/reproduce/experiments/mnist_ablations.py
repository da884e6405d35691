"""The ablations that make sense for digits."""

from __future__ import annotations

from blockgate.lab.reproduce.arms import Arm, at_sparsities
from blockgate.lab.reproduce.experiment import Experiment

__all__ = ["EXPERIMENT"]

# The changes that a network for images can have too.
CHANGES = (
    "plain",
    "eq-1",
    "mean",
    "global",
    "unnormalised",
    "ramp",
    "near-dense",
    "half-key",
    "key-all",
    "low-rank",
    "half-block",
    "double-block",
    "slow-gates",
    "fast-gates",
    "softmax-sum",
    "softmax-sum-annealed",
    "softmax-sum-cold",
    "sigmoid",
    "balance",
    "from-dense",
)


def _arms(scale: str) -> list[Arm]:
    task = "mnist" if scale == "paper" else "mnist-ablation"
    return [Arm(task, "dense"), *at_sparsities(task, [90], *CHANGES)]


EXPERIMENT = Experiment(name="mnist-ablations", about="the same for digits", title="Ablations on MNIST", arms=_arms)
