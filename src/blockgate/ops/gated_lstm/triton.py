"""The recurrence of a gated LSTM on a GPU: the launches of one step, repeated. Nothing waits for the device.

A step is four launches, up to 16 rows and without a hidden layer in the gate: its scores, the selection, the product,
and the cell, each written to where the sequence keeps it. The whole sequence can be captured as a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from blockgate.ops.gated_lstm.triton_steps import UNITS, Steps, StepsBackward, tanh
from blockgate.ops.gpu import NotServedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["gated_lstm", "gated_lstm_backward"]


@triton.jit
def _cell(projected, product, c_before, h, c, activations, size, hidden_size, UNITS: tl.constexpr):
    """New h and c (N, H), and the gates of the cell (N, 4H), from both parts of the sums and the old c."""
    at = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)
    mask = at < size
    first = at // hidden_size * 4 * hidden_size + at % hidden_size
    i = tl.load(projected + first, mask=mask, other=0.0) + tl.load(product + first, mask=mask, other=0.0)
    first += hidden_size
    f = tl.load(projected + first, mask=mask, other=0.0) + tl.load(product + first, mask=mask, other=0.0)
    first += hidden_size
    g = tl.load(projected + first, mask=mask, other=0.0) + tl.load(product + first, mask=mask, other=0.0)
    first += hidden_size
    o = tl.load(projected + first, mask=mask, other=0.0) + tl.load(product + first, mask=mask, other=0.0)
    i, f, g, o = tl.sigmoid(i), tl.sigmoid(f), tanh(g), tl.sigmoid(o)
    new = f * tl.load(c_before + at, mask=mask, other=0.0) + i * g
    tl.store(c + at, new, mask=mask)
    tl.store(h + at, o * tanh(new), mask=mask)
    tl.store(activations + first, o, mask=mask)
    tl.store(activations + first - hidden_size, g, mask=mask)
    tl.store(activations + first - 2 * hidden_size, f, mask=mask)
    tl.store(activations + first - 3 * hidden_size, i, mask=mask)


@triton.jit
def _cell_backward(
    grad_h,
    grad_output,
    grad_c,
    c_before,
    c,
    activations,
    grad_sums,
    grad_c_before,
    size,
    hidden_size,
    HAS_OUTPUT: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Gradients of the sums (N, 4H) and of the old c (N, H)."""
    at = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)
    mask = at < size
    first = at // hidden_size * 4 * hidden_size + at % hidden_size
    i = tl.load(activations + first, mask=mask, other=0.0)
    f = tl.load(activations + first + hidden_size, mask=mask, other=0.0)
    g = tl.load(activations + first + 2 * hidden_size, mask=mask, other=0.0)
    o = tl.load(activations + first + 3 * hidden_size, mask=mask, other=0.0)
    slope_h = tl.load(grad_h + at, mask=mask, other=0.0)
    if HAS_OUTPUT:
        slope_h += tl.load(grad_output + at, mask=mask, other=0.0)
    tanh_c = tanh(tl.load(c + at, mask=mask, other=0.0))
    slope_c = tl.load(grad_c + at, mask=mask, other=0.0) + slope_h * o * (1 - tanh_c * tanh_c)
    before = tl.load(c_before + at, mask=mask, other=0.0)
    tl.store(grad_sums + first, slope_c * g * i * (1 - i), mask=mask)
    tl.store(grad_sums + first + hidden_size, slope_c * before * f * (1 - f), mask=mask)
    tl.store(grad_sums + first + 2 * hidden_size, slope_c * i * (1 - g * g), mask=mask)
    tl.store(grad_sums + first + 3 * hidden_size, slope_h * tanh_c * o * (1 - o), mask=mask)
    tl.store(grad_c_before + at, slope_c * f, mask=mask)


def gated_lstm(
    projected: Tensor,
    h0: Tensor,
    c0: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    hidden_weight: Tensor | None,
    hidden_bias: Tensor | None,
    key: Sequence[int],
    block: Sequence[int],
    selection: Sequence[int],
    normalise: str,
) -> tuple[Tensor, ...]:
    """As `reference.gated_lstm`."""
    if projected.dtype is not torch.float32:
        raise NotServedError(f"the sums are {projected.dtype}; kernels compute states in float32")
    count, (rows, size) = len(projected), h0.shape
    projected, c0 = projected.contiguous(), c0.contiguous()
    output, cells = projected.new_empty(count, rows, size), projected.new_empty(count, rows, size)
    activations = torch.empty_like(projected)
    gate = (gate_weight, gate_bias, hidden_weight, hidden_bias)
    steps = Steps(h0, count, weight, bias, gate, key, block, selection, normalise)
    h, c = h0, c0
    for t in range(count):
        product = steps.product(t, h)
        _cell[(triton.cdiv(rows * size, UNITS),)](
            projected[t], product, c, output[t], cells[t], activations[t], rows * size, size, UNITS=UNITS
        )
        h, c = output[t], cells[t]
    return output, c.clone(), cells, activations, *steps.kept


def gated_lstm_backward(
    weight: Tensor,
    gate_weight: Tensor,
    hidden_weight: Tensor | None,
    h0: Tensor,
    c0: Tensor,
    output: Tensor,
    cells: Tensor,
    activations: Tensor,
    hidden: Tensor,
    scores: Tensor,
    gates: Tensor,
    indices: Tensor,
    grad_output: Tensor | None,
    grad_c_n: Tensor | None,
    key: Sequence[int],
    block: Sequence[int],
    selection: Sequence[int],
    normalise: str,
    need_weight: bool,
) -> tuple[Tensor, ...]:
    """As `reference.gated_lstm_backward`."""
    if output.dtype is not torch.float32:
        raise NotServedError(f"the states are {output.dtype}; kernels compute gradients of states in float32")
    rows, size = h0.shape
    h0, c0 = h0.contiguous(), c0.contiguous()
    before, grad_sums = torch.cat([h0[None], output[:-1]]), torch.empty_like(activations)
    kept, options = (hidden, scores, gates, indices), (key, block, selection, normalise)
    steps = StepsBackward(before, grad_sums, weight, gate_weight, hidden_weight, kept, *options)
    grad_h = torch.zeros_like(h0)
    grad_c = torch.zeros_like(c0) if grad_c_n is None else grad_c_n.contiguous()
    outputs = None if grad_output is None else grad_output.contiguous()
    for t in reversed(range(len(output))):
        grad_c_before = torch.empty_like(c0)
        _cell_backward[(triton.cdiv(rows * size, UNITS),)](
            grad_h,
            grad_h if outputs is None else outputs[t],
            grad_c,
            cells[t - 1] if t else c0,
            cells[t],
            activations[t],
            grad_sums[t],
            grad_c_before,
            rows * size,
            size,
            HAS_OUTPUT=outputs is not None,
            UNITS=UNITS,
        )
        grad_c, grad_h = grad_c_before, steps.through(t)
    return grad_sums, grad_h, grad_c, steps.of_weight(need_weight), steps.scores, steps.hidden
