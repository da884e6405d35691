"""The recurrence of a gated GRU on a GPU: the launches of one step, repeated. Nothing waits for the device.

A step is those of the LSTM's, with a cell of its own: scores, selection, product, cell.
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

__all__ = ["gated_gru", "gated_gru_backward"]


@triton.jit
def _cell(projected, product, h_before, h, from_state, activations, size, hidden_size, UNITS: tl.constexpr):
    """New h (N, H), the state's sums of n (N, H), and the gates of the cell (N, 3H)."""
    at = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)
    mask = at < size
    first = at // hidden_size * 3 * hidden_size + at % hidden_size
    r = tl.load(projected + first, mask=mask, other=0.0) + tl.load(product + first, mask=mask, other=0.0)
    first += hidden_size
    z = tl.load(projected + first, mask=mask, other=0.0) + tl.load(product + first, mask=mask, other=0.0)
    first += hidden_size
    state_n = tl.load(product + first, mask=mask, other=0.0)
    r, z = tl.sigmoid(r), tl.sigmoid(z)
    n = tanh(tl.load(projected + first, mask=mask, other=0.0) + r * state_n)
    tl.store(h + at, n + z * (tl.load(h_before + at, mask=mask, other=0.0) - n), mask=mask)
    tl.store(from_state + at, state_n, mask=mask)
    tl.store(activations + first, n, mask=mask)
    tl.store(activations + first - hidden_size, z, mask=mask)
    tl.store(activations + first - 2 * hidden_size, r, mask=mask)


@triton.jit
def _cell_backward(
    grad_h,
    carried,
    grad_output,
    h_before,
    from_state,
    activations,
    grad_projected,
    grad_sums,
    grad_carried,
    size,
    hidden_size,
    UNITS: tl.constexpr,
):
    """Gradients of both parts of the sums (N, 3H), and of the old h past the product (N, H).

    The gradient of the new h comes in three parts: through the next step's product, past it, and of the output.
    """
    at = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)
    mask = at < size
    first = at // hidden_size * 3 * hidden_size + at % hidden_size
    r = tl.load(activations + first, mask=mask, other=0.0)
    z = tl.load(activations + first + hidden_size, mask=mask, other=0.0)
    n = tl.load(activations + first + 2 * hidden_size, mask=mask, other=0.0)
    slope = tl.load(grad_h + at, mask=mask, other=0.0) + tl.load(carried + at, mask=mask, other=0.0)
    slope += tl.load(grad_output + at, mask=mask, other=0.0)
    before = tl.load(h_before + at, mask=mask, other=0.0)
    slope_n = slope * (1 - z) * (1 - n * n)
    slope_r = slope_n * tl.load(from_state + at, mask=mask, other=0.0) * r * (1 - r)
    slope_z = slope * (before - n) * z * (1 - z)
    tl.store(grad_projected + first, slope_r, mask=mask)
    tl.store(grad_projected + first + hidden_size, slope_z, mask=mask)
    tl.store(grad_projected + first + 2 * hidden_size, slope_n, mask=mask)
    tl.store(grad_sums + first, slope_r, mask=mask)
    tl.store(grad_sums + first + hidden_size, slope_z, mask=mask)
    tl.store(grad_sums + first + 2 * hidden_size, slope_n * r, mask=mask)
    tl.store(grad_carried + at, slope * z, mask=mask)


def gated_gru(
    projected: Tensor,
    h0: Tensor,
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
    """As `reference.gated_gru`."""
    if projected.dtype is not torch.float32:
        raise NotServedError(f"the sums are {projected.dtype}; kernels compute states in float32")
    count, (rows, size) = len(projected), h0.shape
    projected, h0 = projected.contiguous(), h0.contiguous()
    output, from_state = projected.new_empty(count, rows, size), projected.new_empty(count, rows, size)
    activations = torch.empty_like(projected)
    gate = (gate_weight, gate_bias, hidden_weight, hidden_bias)
    steps = Steps(h0, count, weight, bias, gate, key, block, selection, normalise)
    h = h0
    for t in range(count):
        product = steps.product(t, h)
        _cell[(triton.cdiv(rows * size, UNITS),)](
            projected[t], product, h, output[t], from_state[t], activations[t], rows * size, size, UNITS=UNITS
        )
        h = output[t]
    return output, from_state, activations, *steps.kept


def gated_gru_backward(
    weight: Tensor,
    gate_weight: Tensor,
    hidden_weight: Tensor | None,
    h0: Tensor,
    output: Tensor,
    from_state: Tensor,
    activations: Tensor,
    hidden: Tensor,
    scores: Tensor,
    gates: Tensor,
    indices: Tensor,
    grad_output: Tensor,
    key: Sequence[int],
    block: Sequence[int],
    selection: Sequence[int],
    normalise: str,
    need_weight: bool,
) -> tuple[Tensor, ...]:
    """As `reference.gated_gru_backward`."""
    if output.dtype is not torch.float32:
        raise NotServedError(f"the states are {output.dtype}; kernels compute gradients of states in float32")
    rows, size = h0.shape
    before, grad_output = torch.cat([h0[None], output[:-1]]), grad_output.contiguous()
    grad_projected, grad_sums = torch.empty_like(activations), torch.empty_like(activations)
    kept, options = (hidden, scores, gates, indices), (key, block, selection, normalise)
    steps = StepsBackward(before, grad_sums, weight, gate_weight, hidden_weight, kept, *options)
    grad_h, carried = torch.zeros_like(before[0]), torch.zeros_like(before[0])
    for t in reversed(range(len(output))):
        carried_before = torch.empty_like(carried)
        _cell_backward[(triton.cdiv(rows * size, UNITS),)](
            grad_h,
            carried,
            grad_output[t],
            before[t],
            from_state[t],
            activations[t],
            grad_projected[t],
            grad_sums[t],
            carried_before,
            rows * size,
            size,
            UNITS=UNITS,
        )
        carried, grad_h = carried_before, steps.through(t)
    return grad_projected, grad_h + carried, grad_sums, steps.of_weight(need_weight), steps.scores, steps.hidden
