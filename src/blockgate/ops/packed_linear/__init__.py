"""Packing, the products on packed weights, and layers prepared for many calls; for inference only."""

from blockgate.ops.packed_linear.op import (
    dense_packed_linear,
    pack_blocks,
    packed_linear,
    unpack_blocks,
)
from blockgate.ops.packed_linear.prepared import (
    adaptive_counts,
    prepare_dynamic_linear,
    prepare_packed_linear,
    prepared_choice,
    release_prepared_linear,
    run_prepared_adaptive,
    run_prepared_gru,
    run_prepared_linear,
    run_prepared_lstm,
    run_prepared_mlp,
)

__all__ = [
    "adaptive_counts",
    "dense_packed_linear",
    "pack_blocks",
    "packed_linear",
    "prepare_dynamic_linear",
    "prepare_packed_linear",
    "prepared_choice",
    "release_prepared_linear",
    "run_prepared_adaptive",
    "run_prepared_gru",
    "run_prepared_linear",
    "run_prepared_lstm",
    "run_prepared_mlp",
    "unpack_blocks",
]
