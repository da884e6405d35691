"""Selection and normalisation in plain PyTorch: the judge of the native ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["average", "runner_up", "topk_gates", "topk_gates_backward"]


# Rules whose values are distances to the largest score that is not kept.
MARGINS = ("margin", "margin_near_dense")

# The least value of a kept margin: equal scores never mean 0 / 0.
MARGIN_FLOOR = 0.001


def topk_gates(scores: Tensor, selection: Sequence[int], normalise: str) -> tuple[Tensor, Tensor]:
    """Selects and normalises: raw scores (N, S) -> gates (N, E), indices (N, E) ascending, E = groups * open_blocks.

    `selection` is (open_blocks, groups). The S scores form `groups` equal runs (one for a global choice, r for a choice
    per row of blocks); each keeps its `open_blocks` largest, of the scores themselves for margins, else after ReLU.
    Selection is by index: a stable sort gives ties to the lowest one.
    """
    open_blocks, groups = selection
    rows, num_scores = scores.shape
    by_group = scores.view(rows, groups, num_scores // groups)
    if normalise not in MARGINS:
        by_group = torch.relu(by_group)
    order = torch.sort(by_group, dim=-1, descending=True, stable=True).indices
    kept = order[..., :open_blocks].sort(dim=-1).values
    first = torch.arange(groups, device=scores.device)[:, None] * (num_scores // groups)
    values = by_group.gather(-1, kept)
    if normalise in MARGINS:
        values = values - runner_up(by_group, order, open_blocks, normalise)
    values = values.flatten(1)
    return values / average(values, num_scores, normalise), (kept + first).flatten(1)


def topk_gates_backward(
    grad: Tensor, scores: Tensor, gates: Tensor, indices: Tensor, selection: Sequence[int], normalise: str
) -> Tensor:
    """Gradient of the raw scores (N, S) from the gradient of the gates (N, E)."""
    open_blocks, groups = selection
    rows, num_scores = scores.shape
    values = scores.gather(1, indices)
    by_group = scores.view(rows, groups, num_scores // groups)
    order = torch.sort(by_group, dim=-1, descending=True, stable=True).indices
    if normalise in MARGINS:
        values = (values.view(rows, groups, open_blocks) - runner_up(by_group, order, open_blocks, normalise)).flatten(
            1
        )
    else:
        values = torch.relu(values)
    if normalise != "none":
        # With S entries of mean (or mean square) 1, moving one score moves the common divisor by this much.
        shared = (grad * gates).sum(-1, keepdim=True) / num_scores
        divisor = shared if normalise == "mean" else gates * shared
        grad = (grad - divisor) / average(values, num_scores, normalise)
    kept = torch.where(values == 0, 0, grad)
    result = torch.zeros_like(scores).scatter(1, indices, kept)
    if normalise in MARGINS:
        # Moving the runner-up moves every value of its group the other way.
        size = order.shape[-1]
        runner = order[..., min(open_blocks, size - 1), None]
        moved = -kept.view(rows, groups, open_blocks).sum(-1, keepdim=True)
        result = result.view_as(by_group).scatter_add(-1, runner, moved)
        if open_blocks == size and normalise == "margin":
            result = result.scatter_add(-1, runner, moved / size).scatter_add(-1, order[..., :1], -moved / size)
        result = result.view_as(scores)
    return result


def runner_up(by_group: Tensor, order: Tensor, open_blocks: int, normalise: str) -> Tensor:
    """What the kept scores of every group are measured from, (N, groups, 1): the largest score that is not kept.

    And a little less. With all blocks open there is none, and the lowest score takes its place: less an average step,
    or near a dense layer, where scores that hardly differ must mean gates that hardly differ, less 1. That 1 falls with
    the cube of the density.
    """
    size = by_group.shape[-1]
    lowest = by_group.gather(-1, order[..., min(open_blocks, size - 1), None])
    if normalise == "margin_near_dense":
        return lowest - max(MARGIN_FLOOR, (open_blocks / size) ** 3)
    if open_blocks < size:
        return lowest - MARGIN_FLOOR
    step = (by_group.gather(-1, order[..., :1]) - lowest) / size
    return lowest - step - MARGIN_FLOOR


def average(values: Tensor, num_scores: int, normalise: str) -> Tensor:
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
