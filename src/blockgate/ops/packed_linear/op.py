"""Ops on packed weights, for inference only: packing, unpacking and the products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockgate.formats import get_format
from blockgate.ops.packed_linear import reference
from blockgate.ops.registry import define

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "dense_packed_linear",
    "pack_blocks",
    "packed_linear",
    "unpack_blocks",
]


def _fake_pack_blocks(weight: Tensor, block: Sequence[int], name: str) -> tuple[Tensor, Tensor]:
    chosen = get_format(name)
    blocks, scale = chosen.shapes((*weight.shape, *block))
    return weight.new_empty(blocks, dtype=chosen.dtype), weight.new_empty(scale)


def _fake_unpack_blocks(blocks: Tensor, scale: Tensor, grid: Sequence[int], name: str) -> Tensor:  # noqa: ARG001
    return blocks.new_empty(grid[0], grid[1], dtype=torch.float32)


def _fake_product(x: Tensor, *others: Any) -> Tensor:
    *_, grid, _ = others
    return x.new_empty(x.shape[0], grid[0])


# `grid` is (out_features, in_features, block_out, block_in), `format` the name of one in `blockgate.formats`.
_TRITON = "blockgate.ops.packed_linear.triton"

define(
    "pack_blocks",
    "(Tensor weight, SymInt[] block, str format) -> (Tensor, Tensor)",
    kernel=reference.pack_blocks,
    fake=_fake_pack_blocks,
)
define(
    "unpack_blocks",
    "(Tensor blocks, Tensor scale, SymInt[] grid, str format) -> Tensor",
    kernel=reference.unpack_blocks,
    fake=_fake_unpack_blocks,
)
define(
    "packed_linear",
    "(Tensor x, Tensor blocks, Tensor scale, Tensor? bias, Tensor gates, Tensor indices, SymInt[] grid, str format) "
    "-> Tensor",
    kernel=reference.packed_linear,
    fake=_fake_product,
    triton=_TRITON,
)
define(
    "dense_packed_linear",
    "(Tensor x, Tensor blocks, Tensor scale, Tensor? bias, SymInt[] grid, str format) -> Tensor",
    kernel=reference.dense_packed_linear,
    fake=_fake_product,
    triton=_TRITON,
)

# Inference calls these many times a second: the packets themselves, without a Python function around them.
pack_blocks = torch.ops.blockgate.pack_blocks
unpack_blocks = torch.ops.blockgate.unpack_blocks
packed_linear = torch.ops.blockgate.packed_linear
dense_packed_linear = torch.ops.blockgate.dense_packed_linear
