"""ReLU, selection and normalisation of the scores in one op.

One op, so that the number of open blocks meets no other arithmetic in a traced graph: it may change on every step of
a ramp without a recompilation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockgate.ops.registry import define, differentiate, forbid_second_derivative, variant
from blockgate.ops.topk_gates import reference

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NORMALISE", "topk_gates"]

# What kept scores are scaled to. The op knows "margin" too: other values, scaled to rms 1.
NORMALISE = ("mean", "rms", "none")


def topk_gates(
    scores: Tensor, open_blocks: int, *, groups: int = 1, normalise: str = "mean", backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Compact gates and their block indices, (N, groups * open_blocks) each, from raw scores (N, S).

    Args:
        scores: before ReLU, (N, S).
        open_blocks: how many to keep in each group.
        groups: equal runs that the scores are cut into: 1, or one per row of blocks.
        normalise: "mean" or "rms" of all S gates becomes 1; "none" leaves the scores. "margin": the values are
            distances to the largest score that is not kept, and their rms becomes 1.
        backend: "auto", "reference" or "triton".
    """
    return variant("topk_gates", backend)(scores, [open_blocks, groups], normalise)  # type: ignore[no-any-return]


def _fake(scores: Tensor, selection: Sequence[int], normalise: str) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    open_blocks, groups = selection
    shape = (scores.shape[0], groups * open_blocks)
    return scores.new_empty(shape), scores.new_empty(shape, dtype=torch.int64)


def _fake_backward(grad: Tensor, scores: Tensor, *_: Any) -> Tensor:  # noqa: ARG001
    return torch.empty_like(scores)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    scores, ctx.selection, ctx.normalise = inputs
    gates, indices = output
    ctx.mark_non_differentiable(indices)
    ctx.save_for_backward(scores, gates, indices)


def _gradient(ctx: Any, backend: str, grad: Tensor, _grad_indices: None) -> tuple[Tensor, None, None]:
    backward = variant("topk_gates_backward", backend)
    return backward(grad, *ctx.saved_tensors, ctx.selection, ctx.normalise), None, None


_TRITON = "blockgate.ops.topk_gates.triton"

define(
    "topk_gates",
    "(Tensor scores, SymInt[] selection, str normalise) -> (Tensor, Tensor)",
    kernel=reference.topk_gates,
    fake=_fake,
    triton=_TRITON,
)
define(
    "topk_gates_backward",
    "(Tensor grad_gates, Tensor scores, Tensor gates, Tensor indices, SymInt[] selection, str normalise) -> Tensor",
    kernel=reference.topk_gates_backward,
    fake=_fake_backward,
    triton=_TRITON,
)
differentiate("topk_gates", _setup, _gradient)
forbid_second_derivative("topk_gates_backward")
