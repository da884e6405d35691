"""The recurrence of the Quasi-RNN on a GPU: a program walks through time with some features in its registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from blockgate.ops.gpu import NotServedError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["forget_pool", "forget_pool_backward"]

# Features of a program: few, since a batch of sequences has few and every program must wait for its own memory.
_FEATURES = 128


@triton.jit(do_not_specialize=["steps"])
def _forward(candidate, forget, initial, states, steps, size, FEATURES: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    mask = at < size
    state = tl.load(initial + at, mask=mask, other=0.0)
    for _ in range(steps):
        z, f = tl.load(candidate + at, mask=mask, other=0.0), tl.load(forget + at, mask=mask, other=0.0)
        state = f * state + (1 - f) * z
        tl.store(states + at, state, mask=mask)
        candidate += size
        forget += size
        states += size


@triton.jit(do_not_specialize=["steps"])
def _backward(
    grad,
    candidate,
    forget,
    initial,
    states,
    grad_candidate,
    grad_forget,
    grad_initial,
    steps,
    size,
    FEATURES: tl.constexpr,
):
    feature = tl.program_id(0).to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    mask = feature < size
    carried = tl.zeros([FEATURES], tl.float32)
    # The last step may lie beyond what 32 bits count.
    at = feature + (steps - 1).to(tl.int64) * size
    for step in range(steps):
        carried += tl.load(grad + at, mask=mask, other=0.0)
        z, f = tl.load(candidate + at, mask=mask, other=0.0), tl.load(forget + at, mask=mask, other=0.0)
        # The state before the first step is the one to start from.
        first = tl.zeros([FEATURES], tl.int32) + step == steps - 1
        before = tl.load(states + at - size, mask=mask & (first == 0), other=0.0)
        before += tl.load(initial + feature, mask=mask & first, other=0.0)
        tl.store(grad_candidate + at, carried * (1 - f), mask=mask)
        tl.store(grad_forget + at, carried * (before - z), mask=mask)
        carried = carried * f
        at -= size
    tl.store(grad_initial + feature, carried, mask=mask)


def _contiguous(*tensors: Tensor) -> list[Tensor]:
    for t in tensors:
        if t.dtype is not torch.float32:
            raise NotServedError(f"states are {t.dtype}; kernels compute them in float32")
    return [t.contiguous() for t in tensors]


def forget_pool(candidate: Tensor, forget: Tensor, initial: Tensor) -> Tensor:
    """As `reference.forget_pool`."""
    inputs = _contiguous(candidate, forget, initial)
    states, size = torch.empty_like(inputs[0]), initial.numel()
    if states.numel():
        _forward[(triton.cdiv(size, _FEATURES),)](*inputs, states, len(candidate), size, FEATURES=_FEATURES)
    return states


def forget_pool_backward(
    grad: Tensor, candidate: Tensor, forget: Tensor, initial: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.forget_pool_backward`."""
    inputs = _contiguous(grad, candidate, forget, initial, states)
    grads = (torch.empty_like(inputs[1]), torch.empty_like(inputs[2]), torch.empty_like(inputs[3]))
    size = initial.numel()
    if candidate.numel():
        _backward[(triton.cdiv(size, _FEATURES),)](*inputs, *grads, len(candidate), size, FEATURES=_FEATURES)
    else:
        grads[2].zero_()
    return grads
