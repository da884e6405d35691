"""Which blocks of a weight are open for good: even patterns, patterns found in a weight, and back to single entries."""

from __future__ import annotations

import torch
from torch import Tensor

from blockgate.gates.magnitude import block_mean_square
from blockgate.grid import BlockGrid, open_blocks

__all__ = ["PATTERNS", "even_pattern", "expand_blocks", "found_pattern", "random_pattern"]


def even_pattern(grid: BlockGrid, sparsity: float) -> Tensor:
    """Open blocks (r, c), spread evenly along diagonals: rows differ by at most one block, and so do columns.

    Blocks are dealt row by row, each row going on at the column where the last one stopped.
    """
    rows, columns = grid.out_blocks, grid.in_blocks
    count = open_blocks(sparsity, grid.num_blocks)
    cards = torch.arange(count)
    pattern = torch.zeros(rows, columns, dtype=torch.bool)
    # Row i gets the cards from ceil(i * count / rows) to the next row's first.
    pattern[torch.div(cards * rows, count, rounding_mode="floor"), cards % columns] = True
    return pattern


def random_pattern(grid: BlockGrid, sparsity: float) -> Tensor:
    """Open blocks (r, c), drawn at random: as many in every row of blocks."""
    count = open_blocks(sparsity, grid.in_blocks)
    order = torch.rand(grid.out_blocks, grid.in_blocks, device="cpu").argsort(dim=1)
    return order < count


# Fixed patterns by name.
PATTERNS = {"even": even_pattern, "random": random_pattern}


def found_pattern(weight: Tensor, grid: BlockGrid) -> Tensor:
    """The blocks (r, c) of a weight (m, n) that hold anything but zeros."""
    return block_mean_square(weight != 0, grid) > 0


def expand_blocks(blocks: Tensor, grid: BlockGrid) -> Tensor:
    """One value per block (r, c) to one per entry (m, n)."""
    tall = blocks.repeat_interleave(grid.block[0], dim=0)[: grid.out_features]
    return tall.repeat_interleave(grid.block[1], dim=1)[:, : grid.in_features]
