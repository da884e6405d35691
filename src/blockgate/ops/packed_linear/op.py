"""Ops on packed weights, for inference only: packing, unpacking and the products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockgate.ops.packed_linear import reference
from blockgate.ops.registry import define

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "PACKED_DTYPES",
    "dense_packed_linear",
    "pack_blocks",
    "packed_linear",
    "unpack_blocks",
]

PACKED_DTYPES = (torch.float32, torch.bfloat16, torch.int8)


def _fake_pack_blocks(weight: Tensor, block: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = min(block[0], weight.shape[0]), min(block[1], weight.shape[1])
    num_blocks = -(-weight.shape[0] // block[0]) * -(-weight.shape[1] // block[1])
    panels = -(-rows // reference.PANEL)
    scale = (num_blocks, panels * reference.PANEL) if dtype == torch.int8 else (0,)
    shape = (num_blocks, panels, columns, reference.PANEL)
    return weight.new_empty(shape, dtype=dtype), weight.new_empty(scale)


def _fake_unpack_blocks(blocks: Tensor, scale: Tensor, grid: Sequence[int]) -> Tensor:  # noqa: ARG001
    return blocks.new_empty(grid[0], grid[1], dtype=torch.float32)


def _fake_product(x: Tensor, *others: Any) -> Tensor:
    grid = others[-1]
    return x.new_empty(x.shape[0], grid[0])


# `grid` is (out_features, in_features, block_out, block_in).
define(
    "pack_blocks",
    "(Tensor weight, SymInt[] block, ScalarType dtype) -> (Tensor, Tensor)",
    kernel=reference.pack_blocks,
    fake=_fake_pack_blocks,
)
define(
    "unpack_blocks",
    "(Tensor blocks, Tensor scale, SymInt[] grid) -> Tensor",
    kernel=reference.unpack_blocks,
    fake=_fake_unpack_blocks,
)
define(
    "packed_linear",
    "(Tensor x, Tensor blocks, Tensor scale, Tensor? bias, Tensor gates, Tensor indices, SymInt[] grid) -> Tensor",
    kernel=reference.packed_linear,
    fake=_fake_product,
)
define(
    "dense_packed_linear",
    "(Tensor x, Tensor blocks, Tensor scale, Tensor? bias, SymInt[] grid) -> Tensor",
    kernel=reference.dense_packed_linear,
    fake=_fake_product,
)

# Inference calls these many times a second: the packets themselves, without a Python function around them.
pack_blocks = torch.ops.blockgate.pack_blocks
unpack_blocks = torch.ops.blockgate.unpack_blocks
packed_linear = torch.ops.blockgate.packed_linear
dense_packed_linear = torch.ops.blockgate.dense_packed_linear
