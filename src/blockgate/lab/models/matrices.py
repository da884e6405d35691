"""How the matrices of a model are chosen: the makers of a kind by its name."""

from __future__ import annotations

from blockgate.errors import invalid
from blockgate.lab.baselines import MATRICES, Matrices

__all__ = ["matrices"]


def matrices(kind: str) -> Matrices:
    """The makers of a kind by its name."""
    if kind not in MATRICES:
        raise invalid("matrices", expected=f"one of {tuple(MATRICES)}", got=kind, remedy="Check the name.")
    return MATRICES[kind]
