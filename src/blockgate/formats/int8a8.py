"""int8a8: the weights of int8 with inputs in 8 bits, for speed at many rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockgate.formats.base import register
from blockgate.formats.int8 import Int8

if TYPE_CHECKING:
    from blockgate.grid import BlockGrid

__all__ = ["Int8A8"]


@register
class Int8A8(Int8):
    """Stored as int8, so that either loads what the other saved; inputs have 256 levels instead of 65535.

    Levels are chosen for each row of inputs, from its lowest (or 0) to its highest (or 0), so a row without negative
    inputs has them all on one side. 0 is always one of them. An input is off by at most half a level's distance, that
    is by (highest - lowest) / 510.
    """

    name = "int8a8"
    steps = 255

    def round_inputs(self, x: Tensor, grid: BlockGrid) -> Tensor:
        """Whole steps, of one size in each row. A row with NaN or inf becomes NaN throughout."""
        depth = min(grid.block[1], grid.in_features)
        most = min(self.steps, (2**31 - 1) // (self.largest * depth))
        low, high = x.amin(1, keepdim=True).clamp_max(0), x.amax(1, keepdim=True).clamp_min(0)
        size = (high / most - low / most).clamp_min(torch.finfo(torch.float32).tiny)
        size = torch.where(x.isfinite().all(1, keepdim=True), size, float("nan"))
        down = (-low / size).round().clamp_max(most)
        return torch.maximum(torch.minimum((x / size).round(), most - down), -down) * size
