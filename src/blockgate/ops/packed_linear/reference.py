"""Packing and the products on packed blocks in plain PyTorch: the judge of the native ones.

What a format stores is its own business: see `blockgate.formats`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from blockgate.formats import PackedWeight, get_format
from blockgate.grid import BlockGrid
from blockgate.ops.gated_linear.reference import gated_linear

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["dense_packed_linear", "pack_blocks", "packed_linear", "unpack_blocks"]


def pack_blocks(weight: Tensor, block: Sequence[int], name: str) -> tuple[Tensor, Tensor]:
    """weight (m, n) -> blocks and scale in the format called `name`."""
    return get_format(name).pack(weight, BlockGrid(weight.shape[0], weight.shape[1], (block[0], block[1])))


def unpack_blocks(blocks: Tensor, scale: Tensor, grid: Sequence[int], name: str) -> Tensor:
    """The float32 weight (m, n) that packed blocks stand for; `grid` is (m, n, block_out, block_in)."""
    return get_format(name).unpack(PackedWeight(blocks, scale), _block_grid(grid))


def packed_linear(
    x: Tensor,
    blocks: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    gates: Tensor,
    indices: Tensor,
    grid: Sequence[int],
    name: str,
) -> Tensor:
    """`gated_linear` on packed blocks: x (N, n) -> y (N, m)."""
    rows = get_format(name).round_inputs(_wide(x), _block_grid(grid))
    return gated_linear(rows, unpack_blocks(blocks, scale, grid, name), bias, gates, indices, grid[2:]).to(x.dtype)


def dense_packed_linear(
    x: Tensor, blocks: Tensor, scale: Tensor, bias: Tensor | None, grid: Sequence[int], name: str
) -> Tensor:
    """An ordinary linear layer on packed blocks, all of them open: x (N, n) -> y (N, m)."""
    rows = get_format(name).round_inputs(_wide(x), _block_grid(grid))
    return F.linear(rows, unpack_blocks(blocks, scale, grid, name), bias).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _block_grid(grid: Sequence[int]) -> BlockGrid:
    out_features, in_features, block_out, block_in = grid
    return BlockGrid(out_features, in_features, (block_out, block_in))
