"""How the matrices of a model are chosen: the makers of a kind by its name, and how its gates start."""

from __future__ import annotations

from torch import nn

from blockgate.errors import invalid
from blockgate.gates import Gate
from blockgate.lab.baselines import MATRICES, Matrices

__all__ = ["matrices", "start_near_dense"]


def start_near_dense(model: nn.Module) -> None:
    """Starts the gates of a fresh model close to 1, as for matrices that were trained without."""
    for module in model.modules():
        if isinstance(module, Gate):
            module.reset_near_dense()


def matrices(kind: str) -> Matrices:
    """The makers of a kind by its name."""
    if kind not in MATRICES:
        raise invalid("matrices", expected=f"one of {tuple(MATRICES)}", got=kind, remedy="Check the name.")
    return MATRICES[kind]
