"""int8: integers from -127 to 127 times a scale, one for each output of a block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockgate.formats.base import register, rows_of, weight_of
from blockgate.formats.integers import SMALLEST, IntegerFormat

if TYPE_CHECKING:
    from blockgate.grid import BlockGrid

__all__ = ["Int8"]


@register
class Int8(IntegerFormat):
    """Symmetric: the largest weight of an output in a block becomes 127. scale: (num_blocks, padded outputs)."""

    name = "int8"
    bits = 8
    dtype = torch.int8
    largest = 127
    group = None

    def error_bound(self, weight: Tensor, grid: BlockGrid) -> Tensor:
        """Half a step, and a little for the rounding of scales and products."""
        rows = rows_of(weight, grid)
        bound = _scale(rows) * 0.501 + 128 * SMALLEST
        return weight_of(bound[..., None].expand_as(rows), grid)

    def _encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scale = _scale(rows)
        return (rows / torch.where(scale == 0, 1, scale)[..., None]).round().clamp(-127, 127).to(torch.int8), scale

    def _decode(self, stored: Tensor, scale: Tensor, depth: int) -> Tensor:  # noqa: ARG002
        return stored.float() * scale[..., None]

    def _scale_shape(self, num_blocks: int, padded: int, depth: int) -> tuple[int, ...]:  # noqa: ARG002
        return (num_blocks, padded)


def _scale(rows: Tensor) -> Tensor:
    return rows.abs().amax(-1) / 127
