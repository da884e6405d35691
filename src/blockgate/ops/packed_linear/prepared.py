"""Layers prepared for many calls: their arguments are checked once, and a number names them from then on.

Passing and checking the arguments of a whole layer takes longer than computing a small one. These calls are native
only and never traced: the number means nothing in another process.
"""

from __future__ import annotations

import torch

from blockgate.ops.registry import library

__all__ = [
    "prepare_dynamic_linear",
    "prepare_packed_linear",
    "release_prepared_linear",
    "run_prepared_linear",
    "run_prepared_lstm",
]

# `grid` is (out_features, in_features, block_out, block_in), `key` (offset, size). The gate's weights are packed as one
# float32 block each.
library.define("prepare_packed_linear(Tensor blocks, Tensor scale, Tensor? bias, int[] grid, str format) -> int")
library.define(
    "prepare_dynamic_linear(Tensor blocks, Tensor scale, Tensor? bias, int[] grid, str format, "
    "Tensor gate_weight, Tensor? gate_bias, Tensor? hidden_weight, Tensor? hidden_bias, int[] key, int groups, "
    "str normalise) -> int"
)
library.define("run_prepared_linear(Tensor x, int handle, int open_blocks) -> Tensor")
library.define("release_prepared_linear(int handle) -> ()")

# A stack of L LSTM layers: x (T, N, in), h and c (L, N, H), and for each layer the handles of its input and recurrent
# products -> y (T, N, H), h_n and c_n (L, N, H).
library.define(
    "run_prepared_lstm(Tensor x, Tensor h, Tensor c, int[] handles, int[] open_blocks) -> (Tensor, Tensor, Tensor)"
)

# Inference calls these many times a second: the packets themselves, without a Python function around them.
prepare_dynamic_linear = torch.ops.blockgate.prepare_dynamic_linear
prepare_packed_linear = torch.ops.blockgate.prepare_packed_linear
run_prepared_linear = torch.ops.blockgate.run_prepared_linear.default
run_prepared_lstm = torch.ops.blockgate.run_prepared_lstm.default
release_prepared_linear = torch.ops.blockgate.release_prepared_linear
