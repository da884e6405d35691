"""The packed layout in plain PyTorch: what the packed kernels must equal, and what serves where they are not built.

Packed blocks have the shape (num_blocks, panels, depth, 16): a block holds panels of 16 outputs, a panel holds for
each input its 16 weights side by side. One open block is thus one streaming read. Ragged edges are padded with zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from blockgate.grid import BlockGrid
from blockgate.ops.gated_linear.reference import gated_linear

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "PANEL",
    "dense_packed_linear",
    "pack_blocks",
    "packed_linear",
    "quantise_inputs",
    "unpack_blocks",
]

PANEL = 16


def pack_blocks(weight: Tensor, block: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """weight (m, n) -> blocks (num_blocks, panels, depth, 16) of `dtype`, and for int8 their scales.

    int8 is symmetric with one scale for each output row of each block, (num_blocks, panels * 16): the largest weight
    becomes 127. Other types have no scale, an empty tensor.
    """
    grid = BlockGrid(weight.shape[0], weight.shape[1], (block[0], block[1]))
    rows, columns = min(block[0], grid.out_features), min(block[1], grid.in_features)
    panels = -(-rows // PANEL)
    padded = F.pad(
        weight, (0, grid.in_blocks * columns - grid.in_features, 0, grid.out_blocks * rows - grid.out_features)
    )
    blocks = padded.view(grid.out_blocks, rows, grid.in_blocks, columns).transpose(1, 2).flatten(0, 1)
    blocks = F.pad(blocks, (0, 0, 0, panels * PANEL - rows))
    scale = weight.new_empty(0)
    if dtype == torch.int8:
        scale = blocks.abs().amax(-1) / 127
        blocks = (blocks / torch.where(scale == 0, 1, scale)[..., None]).round().clamp(-127, 127)
    packed = blocks.view(-1, panels, PANEL, columns).transpose(2, 3).to(dtype)
    return packed.contiguous(), scale


def unpack_blocks(blocks: Tensor, scale: Tensor, sizes: Sequence[int]) -> Tensor:
    """The float32 weight (m, n) that packed blocks stand for; `sizes` is (m, n, block_out, block_in)."""
    out_features, in_features, block_out, block_in = sizes
    grid = BlockGrid(out_features, in_features, (block_out, block_in))
    rows, columns = min(block_out, out_features), min(block_in, in_features)
    weight = blocks.float().transpose(2, 3).flatten(1, 2)
    if scale.numel():
        weight = weight * scale[..., None]
    weight = weight[:, :rows].view(grid.out_blocks, grid.in_blocks, rows, columns).transpose(1, 2)
    weight = weight.reshape(grid.out_blocks * rows, grid.in_blocks * columns)
    return weight[:out_features, :in_features].contiguous()


def quantise_inputs(x: Tensor, block_in: int) -> Tensor:
    """x (N, n) as products with int8 weights see it: whole steps, of one size per row and column of blocks.

    The largest input of a block becomes 32767 steps, or in a deep block the largest number with which no sum over the
    block exceeds int32. A block with NaN or inf becomes NaN throughout.
    """

    def quantise(part: Tensor) -> Tensor:
        steps = min(2**15 - 1, (2**31 - 1) // (127 * part.shape[1]))
        size = (part.abs().amax(1, keepdim=True) / steps).clamp_min(torch.finfo(torch.float32).tiny)
        size = torch.where(part.isfinite().all(1, keepdim=True), size, float("nan"))
        return (part / size).round() * size

    return torch.cat([quantise(part) for part in x.split(block_in, 1)], 1)


def packed_linear(
    x: Tensor, blocks: Tensor, scale: Tensor, bias: Tensor | None, gates: Tensor, indices: Tensor, grid: Sequence[int]
) -> Tensor:
    """`gated_linear` on packed blocks: x (N, n) -> y (N, m)."""
    if blocks.dtype == torch.int8:
        x = quantise_inputs(x, grid[3])
    return gated_linear(x, unpack_blocks(blocks, scale, grid), bias, gates, indices, grid[2:])


def dense_packed_linear(x: Tensor, blocks: Tensor, scale: Tensor, bias: Tensor | None, grid: Sequence[int]) -> Tensor:
    """An ordinary linear layer on packed blocks, all of them open: x (N, n) -> y (N, m)."""
    if blocks.dtype == torch.int8:
        x = quantise_inputs(x, grid[3])
    return F.linear(x, unpack_blocks(blocks, scale, grid), bias)
