"""The gated block product: every row multiplies only the blocks that its gates open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockgate.ops.gated_linear import reference
from blockgate.ops.gpu import runs_kernels
from blockgate.ops.registry import define, differentiate, forbid_second_derivative, variant

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["gated_linear"]


def gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: Tensor,
    indices: Tensor,
    block: tuple[int, int],
    *,
    backend: str = "auto",
) -> Tensor:
    """y (N, m) = (gates expanded to blocks * weight) x + bias, at the cost of the open blocks.

    Args:
        x: input, (N, n). Half precision is computed in float32, and the result is cast back; on a GPU with Triton the
            factors stay what they are, for tensor cores, and only sums are float32.
        weight: (m, n).
        bias: (m) or None.
        gates: compact gates, (N, E); 0 is closed: no cost, no gradient.
        indices: the block of each gate, (N, E) int64, row-major in the block grid.
        block: block size (out, in).
        backend: "auto", "reference" or "triton".
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    dtype = x.dtype if weight.dtype == x.dtype and runs_kernels(backend, x.device.type) else wide
    y: Tensor = variant("gated_linear", backend)(
        x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), gates.to(wide), indices, [*block]
    )
    return y.to(x.dtype)


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None, gates: Tensor, *rest: Any) -> Tensor:
    """The reference, for half precision in float32."""
    wide = (x.to(gates.dtype), weight.to(gates.dtype), None if bias is None else bias.to(gates.dtype))
    return reference.gated_linear(*wide, gates, *rest).to(x.dtype)


def _reference_backward(grad: Tensor, x: Tensor, weight: Tensor, gates: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    dtype = gates.dtype
    wide = (grad.to(dtype), x.to(dtype), weight.to(dtype))
    grad_x, grad_weight, grad_gates = reference.gated_linear_backward(*wide, gates, *rest)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype), grad_gates


def _fake(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _fake_backward(
    grad: Tensor,  # noqa: ARG001
    x: Tensor,
    weight: Tensor,
    gates: Tensor,
    indices: Tensor,  # noqa: ARG001
    block: Sequence[int],  # noqa: ARG001
    need_x: bool,
    need_weight: bool,
    need_gates: bool,
) -> tuple[Tensor, ...]:
    wanted = ((x, need_x), (weight, need_weight), (gates, need_gates))
    return tuple(t.new_empty(t.shape if need else 0) for t, need in wanted)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, weight, bias, gates, indices, ctx.block = inputs
    ctx.save_for_backward(x, weight, gates, indices)
    ctx.has_bias = bias is not None


def _gradient(ctx: Any, backend: str, grad: Tensor) -> tuple[Tensor | None, ...]:
    need_x, need_weight, need_bias, need_gates = ctx.needs_input_grad[:4]
    grad_x = grad_weight = grad_gates = None
    if need_x or need_weight or need_gates:
        backward = variant("gated_linear_backward", backend)
        grad_x, grad_weight, grad_gates = backward(grad, *ctx.saved_tensors, ctx.block, need_x, need_weight, need_gates)
    return (
        grad_x if need_x else None,
        grad_weight if need_weight else None,
        grad.sum(0) if need_bias and ctx.has_bias else None,
        grad_gates if need_gates else None,
        None,
        None,
    )


_TRITON = "blockgate.ops.gated_linear.triton"

define(
    "gated_linear",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor gates, Tensor indices, SymInt[] block) -> Tensor",
    kernel=_reference,
    fake=_fake,
    triton=_TRITON,
)
define(
    "gated_linear_backward",
    "(Tensor grad_y, Tensor x, Tensor weight, Tensor gates, Tensor indices, SymInt[] block, "
    "bool need_x, bool need_weight, bool need_gates) -> (Tensor, Tensor, Tensor)",
    kernel=_reference_backward,
    fake=_fake_backward,
    triton=_TRITON,
)
differentiate("gated_linear", _setup, _gradient)
forbid_second_derivative("gated_linear_backward")
