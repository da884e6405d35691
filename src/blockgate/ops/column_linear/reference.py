"""Norm gates on packed columns in plain PyTorch: the judge of the native op."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockgate.formats import PackedWeight
from blockgate.formats.columns import unpack_columns
from blockgate.grid import BlockGrid
from blockgate.ops.gated_linear.reference import gated_linear
from blockgate.ops.topk_gates import topk_gates

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["column_linear"]


def column_linear(
    x: Tensor,
    columns: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    norms: Tensor,
    grid: Sequence[int],
    open_blocks: int,
    name: str,
) -> Tensor:
    """y (N, m) for x (N, n): in every row of blocks the `open_blocks` columns of largest |x| * norm, gates 1.

    Args:
        x: (N, n).
        columns: the weight as `pack_columns` stores it in the format called `name`.
        scale: the scales of the format.
        bias: (m) or None.
        norms: of the columns, (rows of blocks, n).
        grid: (m, n, block_out, 1).
        open_blocks: how many columns open in each row of blocks.
        name: of the format.
    """
    cut = BlockGrid(grid[0], grid[1], (grid[2], grid[3]))
    scores = (x.abs().unsqueeze(1) * norms).flatten(1)
    values, indices = topk_gates(scores, open_blocks, groups=cut.out_blocks, normalise="none", backend="reference")
    weight = unpack_columns(PackedWeight(columns, scale), cut, name)
    return gated_linear(x, weight, bias, torch.where(values == 0, values, 1.0), indices, cut.block)
