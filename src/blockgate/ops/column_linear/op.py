"""The op of norm gates on packed columns: scores, selection and product in one call; for inference only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockgate.ops.column_linear import reference
from blockgate.ops.registry import define

__all__ = ["column_linear"]


def _fake(x: Tensor, *others: Any) -> Tensor:
    *_, grid, _, _ = others
    return x.new_empty(x.shape[0], grid[0])


# `grid` is (out_features, in_features, block_out, 1), `format` a name in `blockgate.formats`, `open_blocks` the number
# of columns that open in every row of blocks.
define(
    "column_linear",
    "(Tensor x, Tensor columns, Tensor scale, Tensor? bias, Tensor norms, SymInt[] grid, SymInt open_blocks, "
    "str format) -> Tensor",
    kernel=reference.column_linear,
    fake=_fake,
    cpu_only=True,
)

# Inference calls it many times a second: the packet itself, without a Python function around it.
column_linear = torch.ops.blockgate.column_linear
