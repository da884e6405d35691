"""Recurrences from the end of a sequence: who watches their gates gets the rows in the sequence's own order."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from blockgate.gates.base import Gate

__all__ = ["Turn", "Watcher", "from_the_end", "present_turn"]

_present = threading.local()


class Watcher(Protocol):
    """Who is told what a gate decides."""

    def tell(self, gate: Gate, x: Tensor, values: Tensor, indices: Tensor) -> None:
        """Rows x (N, in), values and indices (N, E)."""


class Turn:
    """One recurrence over sequences from their end.

    Args:
        sizes: rows of each step of the sequences, first step first.
        order: returns (R), where each row stands among all, in the order of the calls; asked only if somebody watches.
    """

    def __init__(self, sizes: Sequence[int], order: Callable[[], Tensor]) -> None:
        self._sizes, self._order = list(sizes), order
        self._held: dict[tuple[Watcher, Gate], list[tuple[Tensor, Tensor, Tensor]]] = {}

    def hold(self, watcher: Watcher, gate: Gate, x: Tensor, values: Tensor, indices: Tensor) -> None:
        """Keeps what a gate decided in one step until the recurrence is over."""
        self._held.setdefault((watcher, gate), []).append((x, values, indices))

    def tell(self) -> None:
        """Passes on what was kept, step by step as if the recurrence had begun at the first."""
        if not self._held:
            return
        order = self._order()
        for (watcher, gate), calls in self._held.items():
            rows = [torch.cat(parts)[order.to(parts[0].device)] for parts in zip(*calls, strict=True)]
            for step in zip(*(part.split(self._sizes) for part in rows), strict=True):
                watcher.tell(gate, *step)


def present_turn() -> Turn | None:
    """The recurrence that runs from the end now, in this thread."""
    return getattr(_present, "turn", None)


@contextmanager
def from_the_end(turn: Turn) -> Iterator[None]:
    """Around a recurrence that runs from the end."""
    before, _present.turn = present_turn(), turn
    try:
        yield
    finally:
        _present.turn = before
    turn.tell()
