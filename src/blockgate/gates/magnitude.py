"""How large the entries of each block of a weight are."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from blockgate.grid import BlockGrid

__all__ = ["block_mean_square"]


def block_mean_square(weight: Tensor, grid: BlockGrid) -> Tensor:
    """Mean of the squared entries of each block, (r, c); smaller blocks at the edges count what they have."""
    return _block_sums(weight.double().square(), grid) / _block_sums(torch.ones_like(weight, dtype=torch.double), grid)


def _block_sums(values: Tensor, grid: BlockGrid) -> Tensor:
    rows, columns, (height, width) = grid.out_blocks, grid.in_blocks, grid.block
    missing = (0, columns * width - grid.in_features, 0, rows * height - grid.out_features)
    return F.pad(values, missing).view(rows, height, columns, width).sum(dim=(1, 3))
