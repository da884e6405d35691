"""int8: integers from -127 to 127 times a scale, one for each output of a block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from blockgate.formats.base import register, rows_of, weight_of
from blockgate.formats.integers import SMALLEST, IntegerFormat

if TYPE_CHECKING:
    from blockgate.grid import BlockGrid

__all__ = ["Int8"]


@register
class Int8(IntegerFormat):
    """Symmetric: the largest weight of an output in a block becomes 127.

    blocks: int8 (num_blocks, panels, ceil(depth / 2), 32), the weights of two inputs side by side, as products read
    them. scale: (num_blocks, padded outputs).
    """

    name = "int8"
    bits = 8
    dtype = torch.int8
    largest = 127
    group = None
    side_by_side = 2

    def error_bound(self, weight: Tensor, grid: BlockGrid) -> Tensor:
        """Half a step, and a little for the rounding of scales and products."""
        rows = rows_of(weight, grid)
        bound = _scale(rows) * 0.501 + 128 * SMALLEST
        return weight_of(bound[..., None].expand_as(rows), grid)

    def _encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scale = _scale(rows)
        integers = (rows / torch.where(scale == 0, 1, scale)[..., None]).round().clamp(-127, 127).to(torch.int8)
        return F.pad(integers, (0, rows.shape[2] % 2)), scale

    def _decode(self, stored: Tensor, scale: Tensor, depth: int) -> Tensor:
        return stored[..., :depth].float() * scale[..., None]

    def _elements(self, depth: int) -> int:
        return depth + depth % 2

    def _scale_shape(self, num_blocks: int, padded: int, depth: int) -> tuple[int, ...]:  # noqa: ARG002
        return (num_blocks, padded)


def _scale(rows: Tensor) -> Tensor:
    return rows.abs().amax(-1) / 127
