"""The paper's first experiment: digits, with a gated network of square layers."""

from __future__ import annotations

from blockgate.lab.reproduce.arms import Arm, at_sparsities
from blockgate.lab.reproduce.experiment import Experiment

__all__ = ["EXPERIMENT"]


def _arms(scale: str) -> list[Arm]:  # noqa: ARG001
    return [Arm("mnist", "dense"), *at_sparsities("mnist", [90], "dynamic", "dynamic-best")]


EXPERIMENT = Experiment(
    name="mnist",
    about="digits",
    title="MNIST",
    arms=_arms,
    # About 2% after 21 epochs, dense and dynamic alike.
    paper={"mnist-dense": 0.02, "mnist-dynamic-90": 0.02},
)
