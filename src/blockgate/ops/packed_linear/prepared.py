"""Layers prepared for many calls: their arguments are checked once, and a number names them from then on.

Passing and checking the arguments of a whole layer takes longer than computing a small one. These calls are native
only and never traced: the number means nothing in another process.
"""

from __future__ import annotations

import torch

from blockgate.ops.registry import library

__all__ = [
    "adaptive_counts",
    "prepare_dynamic_linear",
    "prepare_packed_linear",
    "prepared_choice",
    "release_prepared_linear",
    "run_prepared_adaptive",
    "run_prepared_gru",
    "run_prepared_linear",
    "run_prepared_lstm",
    "run_prepared_mlp",
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

# A paired MLP: `up` was prepared with its gate, whose open blocks all products share; `gate_proj` has one handle, or
# none. x (N, in) -> y (N, out).
library.define(
    "run_prepared_mlp(Tensor x, int up, int down, int[] gate_proj, int open_blocks, str activation) -> Tensor"
)

# The k likeliest words, values and numbers (N, k), of an adaptive softmax over a layer of all words without a gate:
# words [0, bounds[0]) are frequent, group j holds [bounds[j], bounds[j + 1]). And for how many rows that was asked so
# far, and how many groups were computed for them.
library.define(
    "run_prepared_adaptive(Tensor x, int handle, Tensor group_weight, Tensor group_bias, int[] bounds, int k) -> "
    "(Tensor, Tensor)"
)
library.define("adaptive_counts(int handle) -> (int, int)")

# What calls with so many tokens have taught about the ways to run a layer: threads, kind (grouped, streamed) and
# seconds a token of each way (ways, 3), and which is taken now, calls, looks and falls (4). `use` is "layer", of a
# recurrence "steps" or "stack", of an adaptive softmax "likeliest".
library.define("prepared_choice(int handle, str use, int tokens) -> (Tensor, Tensor)")

# For tests: from now on every layer takes the way with this number, or its last; -1: as it finds best.
library.define("hold_way(int way) -> ()")

# A stack of L LSTM layers: x (T, N, in), h and c (L, N, H), and for each layer the handles of its input and recurrent
# products -> y (T, N, H), h_n and c_n (L, N, H).
library.define(
    "run_prepared_lstm(Tensor x, Tensor h, Tensor c, int[] handles, int[] open_blocks) -> (Tensor, Tensor, Tensor)"
)
# The same for GRU layers, which have no c.
library.define("run_prepared_gru(Tensor x, Tensor h, int[] handles, int[] open_blocks) -> (Tensor, Tensor)")

# Inference calls these many times a second: the packets themselves, without a Python function around them.
adaptive_counts = torch.ops.blockgate.adaptive_counts
prepare_dynamic_linear = torch.ops.blockgate.prepare_dynamic_linear
prepare_packed_linear = torch.ops.blockgate.prepare_packed_linear
run_prepared_adaptive = torch.ops.blockgate.run_prepared_adaptive.default
run_prepared_gru = torch.ops.blockgate.run_prepared_gru.default
run_prepared_linear = torch.ops.blockgate.run_prepared_linear.default
run_prepared_lstm = torch.ops.blockgate.run_prepared_lstm.default
run_prepared_mlp = torch.ops.blockgate.run_prepared_mlp.default
release_prepared_linear = torch.ops.blockgate.release_prepared_linear
prepared_choice = torch.ops.blockgate.prepared_choice
