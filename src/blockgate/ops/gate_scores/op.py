"""The gate's linear layer as an op of its own, so that every path computes the same scores for the same row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockgate.ops.gate_scores import reference
from blockgate.ops.registry import define, differentiate, variant

__all__ = ["centred_scores", "gate_scores"]


def gate_scores(key: Tensor, weight: Tensor, bias: Tensor | None, *, backend: str = "auto") -> Tensor:
    """Scores before ReLU: key (N, K), weight (S, K), bias (S) -> (N, S), in float32 or wider."""
    dtype = torch.promote_types(key.dtype, torch.float32)
    key, weight = key.to(dtype), weight.to(dtype)
    return variant("gate_scores", backend)(key, weight, None if bias is None else bias.to(dtype))  # type: ignore[no-any-return]


def centred_scores(key: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, *, backend: str = "auto") -> Tensor:
    """Scores of key - mean before ReLU: key (N, K), weight (S, K), bias (S), mean (K) -> (N, S), float32 or wider.

    For GPUs, where every launch counts: a sum over the weight for each call would be four. The mean gets no gradient.
    """
    dtype = torch.promote_types(key.dtype, torch.float32)
    inputs = (t.to(dtype) for t in (key, weight, bias, mean))
    return variant("centred_scores", backend)(*inputs)  # type: ignore[no-any-return]


def _fake(key: Tensor, weight: Tensor, *_: Tensor | None) -> Tensor:
    return key.new_empty(key.shape[0], weight.shape[0])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    key, weight, bias = inputs
    ctx.save_for_backward(key, weight)
    ctx.has_bias = bias is not None


def _gradient(ctx: Any, _backend: str, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    key, weight = ctx.saved_tensors
    need_key, need_weight, need_bias = ctx.needs_input_grad
    # A backward pass that runs under autocast must not take the gate out of float32.
    with torch.autocast(grad.device.type, enabled=False):
        return (
            grad @ weight if need_key else None,
            grad.T @ key if need_weight else None,
            grad.sum(0) if need_bias and ctx.has_bias else None,
        )


def _setup_centred(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    key, weight, _, mean = inputs
    # A copy: the running mean moves on before the gradient is asked for.
    ctx.save_for_backward(key, weight, mean.clone())


def _centred_gradient(ctx: Any, _backend: str, grad: Tensor) -> tuple[Tensor | None, ...]:
    key, weight, mean = ctx.saved_tensors
    need_key, need_weight, need_bias, _ = ctx.needs_input_grad
    with torch.autocast(grad.device.type, enabled=False):
        return (
            grad @ weight if need_key else None,
            grad.T @ (key - mean) if need_weight else None,
            grad.sum(0) if need_bias else None,
            None,
        )


define("gate_scores", "(Tensor key, Tensor weight, Tensor? bias) -> Tensor", kernel=reference.gate_scores, fake=_fake)
differentiate("gate_scores", _setup, _gradient)
define(
    "centred_scores",
    "(Tensor key, Tensor weight, Tensor bias, Tensor mean) -> Tensor",
    kernel=reference.centred_scores,
    fake=_fake,
    triton="blockgate.ops.gate_scores.triton",
)
differentiate("centred_scores", _setup_centred, _centred_gradient)
