"""Calls that launch every Triton kernel once, as a layer of a common size would; tensors on the meta device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockgate.formats import get_format
from blockgate.ops import gpu
from blockgate.ops.forget_pool import triton as pool
from blockgate.ops.gate_scores import triton as gate
from blockgate.ops.gated_gru import triton as gru
from blockgate.ops.gated_linear import triton as linear
from blockgate.ops.gated_lstm import triton as lstm
from blockgate.ops.packed_linear import triton as packed
from blockgate.ops.topk_gates import triton as topk

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LAUNCHES", "linear_call", "selection_call"]

# The layer of the README's tables, with the default blocks.
OUT, IN, BLOCK, KEY = 6144, 1536, (256, 16), 128


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _gates(rows: int, entries: int) -> tuple[Tensor, Tensor]:
    return _meta(rows, entries), _meta(rows, entries, dtype=torch.int64)


def selection_call(rows: int, groups: int, size: int, normalise: str) -> Callable[[], None]:
    """Selection of half the scores, forward and backward."""

    def call() -> None:
        scores, selection = _meta(rows, groups * size), (size // 2, groups)
        gates, indices = topk.topk_gates(scores, selection, normalise)
        topk.topk_gates_backward(gates, scores, gates, indices, selection, normalise)

    return call


def linear_call(
    rows: int,
    dtype: torch.dtype,
    block: tuple[int, int] = BLOCK,
    density: float = 0.5,
    backward: bool = True,
    out_features: int = OUT,
    in_features: int = IN,
) -> Callable[[], None]:
    """The gated product, and its gradients if asked for."""
    blocks = -(-out_features // block[0]) * -(-in_features // block[1])

    def call() -> None:
        x, weight = _meta(rows, in_features, dtype=dtype), _meta(out_features, in_features, dtype=dtype)
        gates = _gates(rows, max(1, int(blocks * density)))
        y = linear.gated_linear(x, weight, _meta(out_features, dtype=dtype), *gates, block)
        if backward:
            linear.gated_linear_backward(y, x, weight, *gates, block, True, True, True)

    return call


def _scores() -> None:
    gate.centred_scores(_meta(1, KEY), _meta(2304, KEY), _meta(2304), _meta(KEY))


def _packed_call(rows: int, dtype: torch.dtype = torch.float32) -> Callable[[], None]:
    def call() -> None:
        grid = (OUT, IN, *BLOCK)
        for name in gpu.FORMATS:
            stored_as = get_format(name)
            blocks, scale = stored_as.shapes(grid)
            stored = (_meta(*blocks, dtype=stored_as.dtype), _meta(*scale))
            packed.packed_linear(_meta(rows, IN, dtype=dtype), *stored, _meta(OUT), *_gates(rows, 1152), grid, name)

    return call


def _pooling() -> None:
    states, first = _meta(9, 2, 300), _meta(2, 300)
    pool.forget_pool(states, states, first)
    pool.forget_pool_backward(states, states, states, first, states)


def _lstm() -> None:
    steps, rows, size, block, selection = 2, 20, 512, (256, 16), (16, 8)
    state, scored, options = _meta(rows, size), _meta(8 * 32, 128), ((0, 128), block, selection, "margin")
    weight = _meta(4 * size, size)
    kept = lstm.gated_lstm(_meta(steps, rows, 4 * size), state, state, weight, None, scored, None, None, None, *options)
    output, _, *others = kept
    backward: Any = lstm.gated_lstm_backward
    backward(weight, scored, None, state, state, output, *others, output, state, *options, True)


def _gru() -> None:
    steps, rows, size, block, selection = 2, 20, 512, (256, 16), (16, 6)
    state, scored, options = _meta(rows, size), _meta(6 * 32, 128), ((0, 128), block, selection, "margin")
    weight = _meta(3 * size, size)
    kept = gru.gated_gru(_meta(steps, rows, 3 * size), state, weight, None, scored, None, None, None, *options)
    backward: Any = gru.gated_gru_backward
    backward(weight, scored, None, state, *kept, kept[0], *options, True)


LAUNCHES: dict[str, Callable[[], None]] = {
    "scores": _scores,
    "select margin": selection_call(64, 24, 96, "margin"),
    "select near dense": selection_call(64, 24, 96, "margin_near_dense"),
    "select rms": selection_call(64, 24, 96, "rms"),
    "select mean": selection_call(64, 24, 96, "mean"),
    "select none": selection_call(64, 24, 96, "none"),
    "select global": selection_call(64, 1, 2304, "margin"),
    "select in several tiles": selection_call(64, 384, 96, "margin"),
    "float32 few rows": linear_call(1, torch.float32, backward=False),
    "float16 few rows": linear_call(1, torch.float16, backward=False),
    "bfloat16 few rows": linear_call(1, torch.bfloat16, backward=False),
    # Several programs share the open blocks of an output.
    "bfloat16 few rows, shared": linear_call(1, torch.bfloat16, backward=False, out_features=768, in_features=3072),
    "float32 many rows": linear_call(4096, torch.float32),
    "float16 many rows": linear_call(4096, torch.float16),
    "bfloat16 many rows": linear_call(4096, torch.bfloat16),
    "bfloat16 many rows, blocks of 128": linear_call(4096, torch.bfloat16, (128, 128)),
    "bfloat16 many rows, blocks of 64": linear_call(512, torch.bfloat16, (64, 64), 0.25),
    "float16 many rows, blocks of 32": linear_call(512, torch.float16, (32, 32), 0.25),
    "bfloat16 many rows, blocks of 16": linear_call(512, torch.bfloat16, (16, 16), 0.1),
    "bfloat16 many rows, ragged blocks": linear_call(
        100, torch.bfloat16, (48, 20), 0.1, out_features=1001, in_features=333
    ),
    "packed few rows": _packed_call(1),
    "packed many rows": _packed_call(512),
    "packed many rows of bfloat16": _packed_call(512, torch.bfloat16),
    "pooling": _pooling,
    "LSTM": _lstm,
    "GRU": _gru,
}
