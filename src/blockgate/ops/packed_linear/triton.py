"""Products with packed blocks on a GPU, which reads the same blocks as the CPU does.

Inputs are not rounded to whole steps, as the CPU's integer products need: results differ from the CPU's by less than
that rounding, and are the nearer ones to the weight that the blocks stand for. With inputs of half precision, many rows
are multiplied in it, on tensor cores: weights are rounded to it where they have more bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from blockgate.formats import get_format
from blockgate.grid import BlockGrid
from blockgate.ops.gated_linear.triton import Stored, product
from blockgate.ops.gated_linear.triton_rows import FORMATS
from blockgate.ops.gpu import NotServedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["dense_packed_linear", "packed_linear"]


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
    """As `reference.packed_linear`, without the rounding of x."""
    if name not in FORMATS[1:]:
        raise NotServedError(f"there is no kernel for the format {name!r}")
    m, n, block_out, block_in = grid
    shapes = get_format(name).shapes(grid)
    if (tuple(blocks.shape), tuple(scale.shape)) != shapes:
        raise NotServedError(f"blocks and scale are {(*blocks.shape,)} and {(*scale.shape,)}, not {shapes}")
    stored = Stored(blocks.contiguous(), scale.contiguous() if scale.numel() else blocks, name, (0, 0), blocks.shape[2])
    return product(x, stored, bias, gates, indices, BlockGrid(m, n, (block_out, block_in)))


def dense_packed_linear(
    x: Tensor, blocks: Tensor, scale: Tensor, bias: Tensor | None, grid: Sequence[int], name: str
) -> Tensor:
    """As `reference.dense_packed_linear`, without the rounding of x: a gated product with every gate 1."""
    count = BlockGrid(grid[0], grid[1], (grid[2], grid[3])).num_blocks
    gates = torch.ones(x.shape[0], count, device=x.device)
    indices = torch.arange(count, device=x.device).expand(x.shape[0], count)
    return packed_linear(x, blocks, scale, bias, gates, indices, grid, name)
