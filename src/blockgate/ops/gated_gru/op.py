"""The recurrence of a gated GRU over a whole sequence, forward and backward, in one op each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockgate.ops.gated_gru import reference
from blockgate.ops.gated_lstm.op import gate_gradients
from blockgate.ops.registry import define, differentiate, forbid_second_derivative, variant

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["gated_gru"]


def gated_gru(
    projected: Tensor,
    h0: Tensor,
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
) -> Tensor:
    """Output h (T, N, H) of a GRU whose recurrent weight is a gated block product.

    Args:
        projected: the input's part of the cell's gates r, z, n, (T, N, 3H), its bias included; T at least 1. Half
            precision is computed in float32, and the result is cast back.
        h0: (N, H).
        weight: recurrent weight, (3H, H).
        bias: of the state's part, (3H) or None.
        gate_weight: and everything below: see `gated_lstm`.
        gate_bias: (S) or None.
        hidden_weight: (G, key_size) or None.
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
    tensors = (projected, h0, weight, bias, gate_weight, gate_bias, hidden_weight, hidden_bias)
    output, *_ = variant("gated_gru", backend)(
        *(None if t is None else t.to(dtype) for t in tensors),
        [key_offset, key_size],
        [*block],
        [open_blocks, groups],
        normalise,
    )
    return output.to(projected.dtype)  # type: ignore[no-any-return]


def _fake(
    projected: Tensor,
    h0: Tensor,
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
        projected.new_empty(steps, rows, hidden_size),
        projected.new_empty(projected.shape),
        projected.new_empty(0 if hidden_weight is None else (steps, rows, hidden_weight.shape[0])),
        projected.new_empty(steps, rows, gate_weight.shape[0]),
        gates,
        gates.new_empty(gates.shape, dtype=torch.int64),
    )


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    weight, _, _, h0, _, _, activations, hidden, scores = args[:9]
    need_weight = args[-1]
    shaped = (activations, h0, activations, weight if need_weight else weight.new_empty(0), scores, hidden)
    return tuple(t.new_empty(t.shape) for t in shaped)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, h0, weight, _, gate_weight, _, hidden_weight, _, key, block, selection, normalise = inputs
    h, *intermediates = output
    ctx.mark_non_differentiable(*intermediates)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(weight, gate_weight, hidden_weight, h0, h, *intermediates)
    ctx.options = (key, block, selection, normalise)


def _gradient(ctx: Any, backend: str, grad_output: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    inputs = 12
    if grad_output is None:
        return (None,) * inputs
    need = ctx.needs_input_grad
    grad_projected, grad_h0, grad_sums, grad_weight, grad_scores, grad_hidden = variant("gated_gru_backward", backend)(
        *ctx.saved_tensors, grad_output, *ctx.options, need[2]
    )
    _, _, hidden_weight, h0, output, _, _, hidden, *_ = ctx.saved_tensors
    gradients = (
        grad_projected if need[0] else None,
        grad_h0,
        grad_weight if need[2] else None,
        grad_sums.sum((0, 1)) if need[3] else None,
        *gate_gradients(need[4:8], ctx.options[0], hidden_weight, h0, output, hidden, grad_scores, grad_hidden),
    )
    return (*gradients, *(None,) * (inputs - len(gradients)))


_INTERMEDIATES = "Tensor from_state, Tensor activations, Tensor hidden, Tensor scores, Tensor gates, Tensor indices"

_TRITON = "blockgate.ops.gated_gru.triton"

define(
    "gated_gru",
    "(Tensor projected, Tensor h0, Tensor weight, Tensor? bias, Tensor gate_weight, Tensor? gate_bias, "
    "Tensor? hidden_weight, Tensor? hidden_bias, SymInt[] key, SymInt[] block, SymInt[] selection, str normalise) "
    f"-> (Tensor output, {_INTERMEDIATES})",
    kernel=reference.gated_gru,
    fake=_fake,
    triton=_TRITON,
)
define(
    "gated_gru_backward",
    "(Tensor weight, Tensor gate_weight, Tensor? hidden_weight, Tensor h0, Tensor output, "
    f"{_INTERMEDIATES}, "
    "Tensor grad_output, SymInt[] key, SymInt[] block, SymInt[] selection, str normalise, bool need_weight) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    kernel=reference.gated_gru_backward,
    fake=_fake_backward,
    triton=_TRITON,
)
differentiate("gated_gru", _setup, _gradient)
forbid_second_derivative("gated_gru_backward")
