"""Recurrences in plain PyTorch, one step of time after the other: the judge of the native ones."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["forget_pool", "forget_pool_backward"]


def forget_pool(candidate: Tensor, forget: Tensor, initial: Tensor) -> Tensor:
    """States c (T, N, H) of c_t = f_t * c_{t-1} + (1 - f_t) * z_t, from z and f (T, N, H) and c_0 (N, H)."""
    state, states = initial, []
    for z, f in zip(candidate, forget, strict=True):
        state = f * state + (1 - f) * z
        states.append(state)
    return torch.stack(states) if states else torch.empty_like(candidate)


def forget_pool_backward(
    grad: Tensor, candidate: Tensor, forget: Tensor, initial: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of z, f (T, N, H) and c_0 (N, H), back through time."""
    grad_candidate, grad_forget = torch.empty_like(candidate), torch.empty_like(forget)
    carried = torch.zeros_like(initial)
    for t in reversed(range(len(candidate))):
        carried = carried + grad[t]
        before = states[t - 1] if t else initial
        grad_candidate[t] = carried * (1 - forget[t])
        grad_forget[t] = carried * (before - candidate[t])
        carried = carried * forget[t]
    return grad_candidate, grad_forget, carried
