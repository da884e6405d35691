"""Ops on packed weights, for inference alone: packing, the products, and the whole layer in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockgate.ops.packed_linear import reference
from blockgate.ops.registry import define

__all__ = [
    "PACKED_DTYPES",
    "dense_packed_linear",
    "dynamic_linear",
    "pack_blocks",
    "packed_linear",
    "unpack_blocks",
]

PACKED_DTYPES = (torch.float32, torch.bfloat16, torch.int8)


def _fake_pack_blocks(weight: Tensor, block_out: int, block_in: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = min(block_out, weight.shape[0]), min(block_in, weight.shape[1])
    num_blocks = -(-weight.shape[0] // block_out) * -(-weight.shape[1] // block_in)
    panels = -(-rows // reference.PANEL)
    scale = (num_blocks, panels * reference.PANEL) if dtype == torch.int8 else (0,)
    shape = (num_blocks, panels, columns, reference.PANEL)
    return weight.new_empty(shape, dtype=dtype), weight.new_empty(scale)


def _fake_unpack_blocks(blocks: Tensor, scale: Tensor, out_features: int, in_features: int, *_: Any) -> Tensor:  # noqa: ARG001
    return blocks.new_empty(out_features, in_features, dtype=torch.float32)


def _fake_packed_linear(
    x: Tensor,
    blocks: Tensor,  # noqa: ARG001
    scale: Tensor,  # noqa: ARG001
    bias: Tensor | None,  # noqa: ARG001
    gates: Tensor,  # noqa: ARG001
    indices: Tensor,  # noqa: ARG001
    out_features: int,
    *_: Any,
) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


def _fake_dense_packed_linear(
    x: Tensor,
    blocks: Tensor,  # noqa: ARG001
    scale: Tensor,  # noqa: ARG001
    bias: Tensor | None,  # noqa: ARG001
    out_features: int,
    *_: Any,
) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


def _fake_dynamic_linear(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape[0], others[_OUT_FEATURES])


# Where out_features stands among the arguments of dynamic_linear after x.
_OUT_FEATURES = 11

define(
    "pack_blocks",
    "(Tensor weight, SymInt block_out, SymInt block_in, ScalarType dtype) -> (Tensor, Tensor)",
    kernel=reference.pack_blocks,
    fake=_fake_pack_blocks,
)
define(
    "unpack_blocks",
    "(Tensor blocks, Tensor scale, SymInt out_features, SymInt in_features, SymInt block_out, SymInt block_in) "
    "-> Tensor",
    kernel=reference.unpack_blocks,
    fake=_fake_unpack_blocks,
)
define(
    "packed_linear",
    "(Tensor x, Tensor blocks, Tensor scale, Tensor? bias, Tensor gates, Tensor indices, SymInt out_features, "
    "SymInt block_out, SymInt block_in) -> Tensor",
    kernel=reference.packed_linear,
    fake=_fake_packed_linear,
)
define(
    "dense_packed_linear",
    "(Tensor x, Tensor blocks, Tensor scale, Tensor? bias, SymInt out_features, SymInt block_out, SymInt block_in) "
    "-> Tensor",
    kernel=reference.dense_packed_linear,
    fake=_fake_dense_packed_linear,
)
define(
    "dynamic_linear",
    "(Tensor x, Tensor blocks, Tensor scale, Tensor? bias, Tensor gate_weight, Tensor? gate_bias, "
    "Tensor? hidden_weight, Tensor? hidden_bias, SymInt key_offset, SymInt key_size, SymInt num_blocks, "
    "SymInt hidden_size, SymInt out_features, SymInt block_out, SymInt block_in, SymInt open_blocks, SymInt groups, "
    "str normalise) -> Tensor",
    kernel=reference.dynamic_linear,
    fake=_fake_dynamic_linear,
)

# Inference calls these many times a second: the packets themselves, without a Python function around them.
pack_blocks = torch.ops.blockgate.pack_blocks
unpack_blocks = torch.ops.blockgate.unpack_blocks
packed_linear = torch.ops.blockgate.packed_linear
dense_packed_linear = torch.ops.blockgate.dense_packed_linear
dynamic_linear = torch.ops.blockgate.dynamic_linear
