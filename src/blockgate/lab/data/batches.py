"""A long text cut for training: columns that are read side by side, in segments whose states are carried on."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from blockgate.errors import invalid

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IGNORED", "Segment", "cut_columns", "equal_segments", "varied_segments"]

# The target of a place that has none.
IGNORED = -1

# How far varied segments stray from their mean length, and the shortest there is (Merity et al., 2017).
SPREAD = 5.0
SHORTEST = 5


class Segment(NamedTuple):
    """A range of steps."""

    start: int
    length: int


def cut_columns(tokens: Tensor, columns: int, *, keep_all: bool) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (T, columns) each: every column is a piece of the text, and its targets are one word ahead.

    Args:
        tokens: (L,).
        columns: how many pieces.
        keep_all: whether every word but the first is a target, with IGNORED after the end of a shorter last piece.
            Otherwise what doesn't fill all columns is left out.
    """
    steps = -(-(len(tokens) - 1) // columns) if keep_all else (len(tokens) - 1) // columns
    if steps < 1:
        raise invalid(
            "batch size",
            expected=f"1 to {len(tokens) - 1}, one word a column",
            got=columns,
            remedy="Take a smaller one.",
        )
    filler = max(0, steps * columns - (len(tokens) - 1))
    inputs = torch.cat([tokens[:-1], tokens.new_zeros(filler)])
    targets = torch.cat([tokens[1:], tokens.new_full((filler,), IGNORED)])
    size = steps * columns
    return inputs[:size].view(columns, steps).t().contiguous(), targets[:size].view(columns, steps).t().contiguous()


def equal_segments(steps: int, length: int) -> list[Segment]:
    """All steps in segments of one length, the last perhaps shorter."""
    return [Segment(start, min(length, steps - start)) for start in range(0, steps, length)]


def varied_segments(steps: int, length: int, generator: torch.Generator) -> list[Segment]:
    """All steps in segments of random length around `length`, or around half of it for one in twenty.

    So no two epochs cut the text at the same places (Merity et al., 2017).
    """
    segments, start = [], 0
    while start < steps:
        mean = length if torch.rand((), generator=generator) < 0.95 else length / 2
        drawn = max(SHORTEST, int(mean + SPREAD * torch.randn((), generator=generator)))
        segments.append(Segment(start, min(drawn, steps - start)))
        start += drawn
    return segments
