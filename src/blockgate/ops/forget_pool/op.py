"""The recurrence of the Quasi-RNN: a gated running average over time, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockgate.ops.forget_pool import reference
from blockgate.ops.registry import define, differentiate, forbid_second_derivative, variant

__all__ = ["forget_pool"]


def forget_pool(candidate: Tensor, forget: Tensor, initial: Tensor, *, backend: str = "auto") -> Tensor:
    """All states c (T, N, H) of c_t = f_t * c_{t-1} + (1 - f_t) * z_t.

    Args:
        candidate: z, (T, N, H). Half precision is computed in float32, and the result is cast back.
        forget: f, (T, N, H), in [0, 1].
        initial: c_0, (N, H).
        backend: "auto", "reference" or "triton".
    """
    dtype = torch.promote_types(candidate.dtype, torch.float32)
    states = variant("forget_pool", backend)(candidate.to(dtype), forget.to(dtype), initial.to(dtype))
    return states.to(candidate.dtype)  # type: ignore[no-any-return]


def _fake(candidate: Tensor, forget: Tensor, initial: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(candidate, memory_format=torch.contiguous_format)


def _fake_backward(
    grad: Tensor,  # noqa: ARG001
    candidate: Tensor,
    forget: Tensor,
    initial: Tensor,
    states: Tensor,  # noqa: ARG001
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (candidate, forget, initial))


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


def _gradient(ctx: Any, backend: str, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return variant("forget_pool_backward", backend)(grad, *ctx.saved_tensors)  # type: ignore[no-any-return]


_TRITON = "blockgate.ops.forget_pool.triton"

define(
    "forget_pool",
    "(Tensor candidate, Tensor forget, Tensor initial) -> Tensor",
    kernel=reference.forget_pool,
    fake=_fake,
    triton=_TRITON,
)
define(
    "forget_pool_backward",
    "(Tensor grad_states, Tensor candidate, Tensor forget, Tensor initial, Tensor states) -> (Tensor, Tensor, Tensor)",
    kernel=reference.forget_pool_backward,
    fake=_fake_backward,
    triton=_TRITON,
)
differentiate("forget_pool", _setup, _gradient)
forbid_second_derivative("forget_pool_backward")
