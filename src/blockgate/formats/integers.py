"""What formats of whole numbers share: rounded inputs, exact sums, and weights that must be finite."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockgate.errors import invalid
from blockgate.formats.base import Format

if TYPE_CHECKING:
    from blockgate.grid import BlockGrid

__all__ = ["SMALLEST", "IntegerFormat"]

# The distance of neighbouring float32 numbers near 0: what a scale of denormal size is rounded to.
SMALLEST = 2.0**-149


class IntegerFormat(Format, ABC):
    """Weights are integers times a scale. Products sum integers exactly, and only then round to float.

    Exact sums have no order: batches, threads and instruction sets agree on every bit.
    """

    largest: int  # magnitude of a stored integer
    group: int | None  # inputs that share a scale; None: all of a block
    steps = 2**15 - 1  # that inputs are rounded to at most

    def round_inputs(self, x: Tensor, grid: BlockGrid) -> Tensor:
        """Whole steps, of one size for each row and column of blocks.

        The largest input of a block becomes 32767 steps, or the largest number with which no sum exceeds int32. A
        block with NaN or inf becomes NaN throughout.
        """

        def rounded(part: Tensor) -> Tensor:
            summed = min(part.shape[1], self.group or part.shape[1])
            steps = min(self.steps, (2**31 - 1) // (self.largest * summed))
            size = (part.abs().amax(1, keepdim=True) / steps).clamp_min(torch.finfo(torch.float32).tiny)
            size = torch.where(part.isfinite().all(1, keepdim=True), size, float("nan"))
            return (part / size).round() * size

        return torch.cat([rounded(part) for part in x.split(grid.block[1], 1)], 1)

    def check_weight(self, weight: Tensor) -> None:
        """Refuses NaN and inf, which have no place among integers."""
        if not weight.is_meta and not torch.isfinite(weight).all():
            raise invalid(
                "weight", expected=f"finite values for {self.name}", got="NaN or inf", remedy="Pack to 'float32'."
            )
