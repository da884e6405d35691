"""The recurrence of a gated LSTM over a whole sequence, forward and backward, in one op each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockgate.ops.gated_lstm import reference
from blockgate.ops.registry import define, differentiate, forbid_second_derivative, variant

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["gate_gradients", "gated_lstm"]


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
    *,
    key_offset: int,
    key_size: int,
    block: tuple[int, int],
    open_blocks: int,
    groups: int = 1,
    normalise: str = "mean",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Output h (T, N, H) and last cell (N, H) of an LSTM whose recurrent weight is a gated block product.

    Args:
        projected: the input's part of the cell's gates i, f, g, o, (T, N, 4H), its bias included; T at least 1.
            Half precision is computed in float32, and the results are cast back.
        h0: (N, H).
        c0: (N, H).
        weight: recurrent weight, (4H, H).
        bias: (4H) or None.
        gate_weight: last layer of the block gate, (S, key_size), or (S, G) after a hidden layer.
        gate_bias: (S) or None.
        hidden_weight: the gate's hidden ReLU layer, (G, key_size), or None.
        hidden_bias: (G) or None.
        key_offset: first feature of h that the block gate reads.
        key_size: how many it reads.
        block: block size (out, in) of the recurrent weight.
        open_blocks: see `topk_gates`, as for the next two.
        groups: 1, or one per row of blocks.
        normalise: "mean", "rms" or "none".
        backend: "auto", "reference" or "triton".
    """
    if not projected.shape[1]:
        # Kernels have nothing to do, and ask for at least one row.
        backend = "reference"
    dtype = torch.promote_types(projected.dtype, torch.float32)
    tensors = (projected, h0, c0, weight, bias, gate_weight, gate_bias, hidden_weight, hidden_bias)
    output, c_n, *_ = variant("gated_lstm", backend)(
        *(None if t is None else t.to(dtype) for t in tensors),
        [key_offset, key_size],
        [*block],
        [open_blocks, groups],
        normalise,
    )
    return output.to(projected.dtype), c_n.to(projected.dtype)


def _fake(
    projected: Tensor,
    h0: Tensor,
    c0: Tensor,
    weight: Tensor,  # noqa: ARG001
    bias: Tensor | None,  # noqa: ARG001
    gate_weight: Tensor,
    gate_bias: Tensor | None,  # noqa: ARG001
    hidden_weight: Tensor | None,
    hidden_bias: Tensor | None,  # noqa: ARG001
    key: Sequence[int],  # noqa: ARG001
    block: Sequence[int],  # noqa: ARG001
    selection: Sequence[int],
    normalise: str,  # noqa: ARG001
) -> tuple[Tensor, ...]:
    open_blocks, groups = selection
    steps, rows, hidden_size = projected.shape[0], *h0.shape
    gates = projected.new_empty(steps, rows, groups * open_blocks)
    return (
        projected.new_empty(steps, rows, hidden_size),
        c0.new_empty(c0.shape),
        projected.new_empty(steps, rows, hidden_size),
        projected.new_empty(projected.shape),
        projected.new_empty(0 if hidden_weight is None else (steps, rows, hidden_weight.shape[0])),
        projected.new_empty(steps, rows, gate_weight.shape[0]),
        gates,
        gates.new_empty(gates.shape, dtype=torch.int64),
    )


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    weight, _, _, h0, c0, _, _, activations, hidden, scores = args[:10]
    need_weight = args[-1]
    shaped = (activations, h0, c0, weight if need_weight else weight.new_empty(0), scores, hidden)
    return tuple(t.new_empty(t.shape) for t in shaped)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, h0, c0, weight, _, gate_weight, _, hidden_weight, _, key, block, selection, normalise = inputs
    h, _, *intermediates = output
    ctx.mark_non_differentiable(*intermediates)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(weight, gate_weight, hidden_weight, h0, c0, h, *intermediates)
    ctx.options = (key, block, selection, normalise)


def _gradient(
    ctx: Any, backend: str, grad_output: Tensor | None, grad_c_n: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    inputs = 13
    if grad_output is None and grad_c_n is None:
        return (None,) * inputs
    need = ctx.needs_input_grad
    backward = variant("gated_lstm_backward", backend)
    grad_projected, grad_h0, grad_c0, grad_weight, grad_scores, grad_hidden = backward(
        *ctx.saved_tensors, grad_output, grad_c_n, *ctx.options, need[3]
    )
    _, _, hidden_weight, h0, _, output, _, _, hidden, *_ = ctx.saved_tensors
    gradients = (
        grad_projected if need[0] else None,
        grad_h0,
        grad_c0,
        grad_weight if need[3] else None,
        grad_projected.sum((0, 1)) if need[4] else None,
        *gate_gradients(need[5:9], ctx.options[0], hidden_weight, h0, output, hidden, grad_scores, grad_hidden),
    )
    return (*gradients, *(None,) * (inputs - len(gradients)))


def gate_gradients(
    need: Sequence[bool],
    key: Sequence[int],
    hidden_weight: Tensor | None,
    h0: Tensor,
    output: Tensor,
    hidden: Tensor,
    grad_scores: Tensor,
    grad_hidden: Tensor,
) -> tuple[Tensor | None, ...]:
    """Of the gate's weight and bias and those of its hidden layer, from the gradients of scores and hidden layer.

    `need` says which of the four somebody asks for; `key` is (offset, size), and the rest as in the op.
    """
    columns = slice(key[0], key[0] + key[1])
    states = torch.cat([h0[None, :, columns], output[:-1, :, columns]]).flatten(0, 1)
    grad_scores = grad_scores.flatten(0, 1)
    weight = hidden_grad = hidden_bias = None
    # A backward pass that runs under autocast must not take the gate out of float32.
    with torch.autocast(grad_scores.device.type, enabled=False):
        if need[0]:
            weight = grad_scores.T @ (states if hidden_weight is None else hidden.flatten(0, 1))
        if hidden_weight is not None:
            grad_hidden = grad_hidden.flatten(0, 1)
            hidden_grad = grad_hidden.T @ states if need[2] else None
            hidden_bias = grad_hidden.sum(0) if need[3] else None
    return weight, grad_scores.sum(0) if need[1] else None, hidden_grad, hidden_bias


_INTERMEDIATES = "Tensor cells, Tensor activations, Tensor hidden, Tensor scores, Tensor gates, Tensor indices"

_TRITON = "blockgate.ops.gated_lstm.triton"

define(
    "gated_lstm",
    "(Tensor projected, Tensor h0, Tensor c0, Tensor weight, Tensor? bias, Tensor gate_weight, Tensor? gate_bias, "
    "Tensor? hidden_weight, Tensor? hidden_bias, SymInt[] key, SymInt[] block, SymInt[] selection, str normalise) "
    f"-> (Tensor output, Tensor c_n, {_INTERMEDIATES})",
    kernel=reference.gated_lstm,
    fake=_fake,
    triton=_TRITON,
)
define(
    "gated_lstm_backward",
    "(Tensor weight, Tensor gate_weight, Tensor? hidden_weight, Tensor h0, Tensor c0, Tensor output, "
    f"{_INTERMEDIATES}, "
    "Tensor? grad_output, Tensor? grad_c_n, SymInt[] key, SymInt[] block, SymInt[] selection, str normalise, "
    "bool need_weight) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    kernel=reference.gated_lstm_backward,
    fake=_fake_backward,
    triton=_TRITON,
)
differentiate("gated_lstm", _setup, _gradient)
forbid_second_derivative("gated_lstm_backward")
