"""Selection and normalisation in plain PyTorch: the judge of the native ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["topk_gates", "topk_gates_backward"]


def topk_gates(scores: Tensor, selection: Sequence[int], normalise: str) -> tuple[Tensor, Tensor]:
    """Selects and normalises: raw scores (N, S) -> gates (N, E), indices (N, E) ascending, E = groups * open_blocks.

    `selection` is (open_blocks, groups). The S scores form `groups` equal runs (one for a global choice, r for a choice
    per row of blocks); each keeps its `open_blocks` largest after ReLU. Selection is by index: a stable sort gives ties
    to the lowest one.
    """
    open_blocks, groups = selection
    rows, num_scores = scores.shape
    by_group = torch.relu(scores).view(rows, groups, num_scores // groups)
    order = torch.sort(by_group, dim=-1, descending=True, stable=True).indices
    kept = order[..., :open_blocks].sort(dim=-1).values
    first = torch.arange(groups, device=scores.device)[:, None] * (num_scores // groups)
    values = by_group.gather(-1, kept).flatten(1)
    return values / _average(values, num_scores, normalise), (kept + first).flatten(1)


def topk_gates_backward(grad: Tensor, scores: Tensor, gates: Tensor, indices: Tensor, normalise: str) -> Tensor:
    """Gradient of the raw scores (N, S) from the gradient of the gates (N, E)."""
    num_scores = scores.shape[1]
    values = torch.relu(scores.gather(1, indices))
    if normalise != "none":
        # With S entries of mean (or mean square) 1, moving one score moves the common divisor by this much.
        shared = (grad * gates).sum(-1, keepdim=True) / num_scores
        divisor = shared if normalise == "mean" else gates * shared
        grad = (grad - divisor) / _average(values, num_scores, normalise)
    kept = torch.where(values == 0, 0, grad)
    return torch.zeros_like(scores).scatter(1, indices, kept)


def _average(values: Tensor, num_scores: int, normalise: str) -> Tensor:
    """What a row's kept values (N, E) are divided by (N, 1), so that its S gates, closed ones included, average 1.

    A row without a positive value is divided by 1: its gates stay 0, and its gradient is 0, not NaN.
    """
    if normalise == "none":
        return torch.ones_like(values[:, :1])
    # In units of the largest value, so that squares and sums neither overflow nor vanish.
    largest = values.detach().amax(-1, keepdim=True)
    largest = torch.where(largest == 0, 1, largest)
    unit = values / largest
    power = unit if normalise == "mean" else unit.square()
    average = power.sum(-1, keepdim=True) / num_scores
    average = torch.where(average == 0, 1, average)
    return largest * (average if normalise == "mean" else average.sqrt())
