"""How large the entries of each block of a weight are, and what each block adds to the output."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from blockgate.grid import BlockGrid

__all__ = ["block_mean_square", "contributions"]


def block_mean_square(weight: Tensor, grid: BlockGrid) -> Tensor:
    """Mean of the squared entries of each block, (r, c); smaller blocks at the edges count what they have."""
    return _block_sums(weight.double().square(), grid) / _block_sums(torch.ones_like(weight, dtype=torch.double), grid)


def contributions(x: Tensor, weight: Tensor, grid: BlockGrid) -> Tensor:
    """Squared norm of every block's product with every row, (N, r * c), for x (N, n) and weight (m, n)."""
    rows, columns, (height, width) = grid.out_blocks, grid.in_blocks, _size(grid)
    missing = columns * width - grid.in_features
    blocks = F.pad(weight, (0, missing, 0, rows * height - grid.out_features)).view(rows, height, columns, width)
    parts = F.pad(x, (0, missing)).view(-1, columns, width)
    # |W x|^2 = x^T (W^T W) x: for thin blocks far less work than the products.
    squares = torch.einsum("rhcv,rhcw->cvwr", blocks, blocks).flatten(1, 2)
    pairs = torch.einsum("ncv,ncw->cnvw", parts, parts).flatten(2)
    return torch.bmm(pairs, squares).permute(1, 2, 0).flatten(1).clamp(min=0)


def _size(grid: BlockGrid) -> tuple[int, int]:
    """Of a block, which may be far larger than the weight."""
    return min(grid.block[0], grid.out_features), min(grid.block[1], grid.in_features)


def _block_sums(values: Tensor, grid: BlockGrid) -> Tensor:
    rows, columns, (height, width) = grid.out_blocks, grid.in_blocks, _size(grid)
    missing = (0, columns * width - grid.in_features, 0, rows * height - grid.out_features)
    return F.pad(values, missing).view(rows, height, columns, width).sum(dim=(1, 3))
