"""int4: integers from -8 to 7 times a scale, one for every 32 inputs of an output in a block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from blockgate.formats.base import register, rows_of, weight_of
from blockgate.formats.integers import SMALLEST, IntegerFormat

if TYPE_CHECKING:
    from blockgate.grid import BlockGrid

__all__ = ["Int4"]

GROUP = 32
# Scales that are tried: the weight of largest magnitude over each of these. Divided by -8 it becomes -8, and the other
# sign has seven steps left; smaller scales round it off, larger ones make room on the other side. Of 32 normal weights
# the best of them leaves 0.71 of the squared error that 7 alone, the symmetric choice, leaves.
DIVISORS = (-8.0, -8.25, -8.5, -7.75, -7.5, -7.25, 7.0)


@register
class Int4(IntegerFormat):
    """Two inputs share a byte, the first in its lower half, in two's complement.

    blocks: uint8 (num_blocks, panels, ceil(depth / 2), 16). scale: (num_blocks, groups, padded outputs), of either
    sign, since the range is not symmetric: of those that are tried, the one with the least sum of squared errors.
    """

    name = "int4"
    bits = 4
    dtype = torch.uint8
    largest = 8
    group = GROUP

    def error_bound(self, weight: Tensor, grid: BlockGrid) -> Tensor:
        """3/17 of the largest weight of the group: one that is its negative may be 1.5 steps of an 8.5th off."""
        rows = rows_of(weight, grid)
        bound = _groups(rows).abs().amax(-1, keepdim=True) * (3 / 17 * 1.001) + 16 * SMALLEST
        return weight_of(bound.expand(-1, -1, -1, GROUP).flatten(2)[..., : rows.shape[2]], grid)

    def _encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        groups = _groups(rows)
        extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        scale, least = extreme / DIVISORS[0], torch.full_like(extreme, torch.inf, dtype=torch.float64)
        for divisor in DIVISORS:
            tried = extreme / divisor
            error = _squared_error(groups, tried)
            scale, least = torch.where(error < least, tried, scale), torch.minimum(error, least)
        integers = _integers(groups, scale).flatten(2)[..., : rows.shape[2]].to(torch.int32)
        pairs = F.pad(integers, (0, rows.shape[2] % 2)).unflatten(2, (-1, 2)) & 15
        stored = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)
        return stored, scale.squeeze(-1).transpose(1, 2).contiguous()

    def _decode(self, stored: Tensor, scale: Tensor, depth: int) -> Tensor:
        halves = torch.stack([stored & 15, stored >> 4], -1).flatten(2)[..., :depth].to(torch.int32)
        integers = torch.where(halves > 7, halves - 16, halves)
        return integers.float() * scale.transpose(1, 2).repeat_interleave(GROUP, 2)[..., :depth]

    def _elements(self, depth: int) -> int:
        return -(-depth // 2)

    def _scale_shape(self, num_blocks: int, padded: int, depth: int) -> tuple[int, ...]:
        return (num_blocks, -(-depth // GROUP), padded)


def _groups(rows: Tensor) -> Tensor:
    """Rows (num_blocks, outputs, depth) as groups (num_blocks, outputs, groups, 32), the last one padded with zeros."""
    padded = F.pad(rows, (0, -rows.shape[2] % GROUP))
    return padded.view(*rows.shape[:2], -1, GROUP)


def _integers(groups: Tensor, scale: Tensor) -> Tensor:
    return (groups / torch.where(scale == 0, 1, scale)).round().clamp(-8, 7)


def _squared_error(groups: Tensor, scale: Tensor) -> Tensor:
    """Sums (num_blocks, outputs, groups, 1) in float64, weight after weight, so that native code gets the same bits.

    Each difference is rounded to float32, and its square is then exact: fused or not, the additions agree. A scale that
    turns a huge weight to inf has an infinite error.
    """
    difference = (groups.double() - (_integers(groups, scale) * scale).double()).float().double()
    total = torch.zeros_like(difference[..., :1])
    for k in range(GROUP):
        total = total + difference[..., k : k + 1].square()
    return total
