"""The references of all ops under one roof."""

from blockgate.ops.forget_pool.reference import forget_pool
from blockgate.ops.gate_scores.reference import gate_scores
from blockgate.ops.gated_linear.reference import gated_linear, gated_linear_backward
from blockgate.ops.packed_linear.reference import (
    dense_packed_linear,
    pack_blocks,
    packed_linear,
    unpack_blocks,
)
from blockgate.ops.topk_gates.reference import topk_gates, topk_gates_backward

__all__ = [
    "dense_packed_linear",
    "forget_pool",
    "gate_scores",
    "gated_linear",
    "gated_linear_backward",
    "pack_blocks",
    "packed_linear",
    "topk_gates",
    "topk_gates_backward",
    "unpack_blocks",
]
