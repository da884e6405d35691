"""The method in plain PyTorch: slow, obvious, and the judge of every kernel.

Symbols: N rows of input; a weight W of m x n cut into r x c blocks; S = r * c scores a row; E compact gates a row,
each a value and the index of its block (row-major in the grid). A gate of value 0 is closed: its block is not read,
adds nothing, and receives no gradient. NaN or inf anywhere in a row of input makes all of its outputs NaN.

    s = FF(key(h))                              gate_scores
    G = normalise(topk(ReLU(s)))                topk_gates
    y = (G expanded to blocks * W) h + bias     gated_linear

Forward functions are differentiable as they stand, so their gradients judge the written-out backward functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from blockgate.errors import invalid
from blockgate.grid import BlockGrid

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "gate_scores",
    "gated_linear",
    "gated_linear_backward",
    "topk_gates",
    "topk_gates_backward",
]


def gate_scores(key: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One linear layer of the gate: key (N, K), weight (S, K), bias (S) -> (N, S)."""
    return F.linear(key, weight, bias)


def topk_gates(scores: Tensor, open_blocks: int, groups: int, normalise: str) -> tuple[Tensor, Tensor]:
    """Selects and normalises: raw scores (N, S) -> gates (N, E), indices (N, E) ascending, E = groups * open_blocks.

    The S scores form `groups` equal runs (one for a global choice, r for a choice per row of blocks); each keeps its
    `open_blocks` largest after ReLU. Selection is by index: a stable sort gives ties to the lowest one.
    """
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


def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, gates: Tensor, indices: Tensor, block_out: int, block_in: int
) -> Tensor:
    """The gated block product: x (N, n), weight (m, n), bias (m), gates and indices (N, E) -> y (N, m).

    One open block at a time, over the rows that open it: memory grows with N * m, never with N * m * n.
    """
    grid = _checked_grid(weight, indices, block_out, block_in)
    y = x.new_zeros(x.shape[0], grid.out_features)
    if bias is not None:
        y = y + bias
    for block, rows, entries in _rows_by_block(gates, indices):
        outs, ins = grid.slices(block)
        product = x[rows, ins] @ weight[outs, ins].T
        y[:, outs] = y[:, outs].index_add(0, rows, gates[rows, entries, None] * product)
    # A closed block never reads its part of x; a dense layer would have passed on what is wrong with it.
    return torch.where(torch.isfinite(x).all(-1, keepdim=True), y, torch.nan)


def gated_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    gates: Tensor,
    indices: Tensor,
    block_out: int,
    block_in: int,
    need_x: bool,
    need_weight: bool,
    need_gates: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (N, n), weight (m, n) and gates (N, E) from that of y (N, m); an empty tensor if not needed."""
    grid = _checked_grid(weight, indices, block_out, block_in)
    grad_x = x.new_zeros(x.shape if need_x else 0)
    grad_weight = weight.new_zeros(weight.shape if need_weight else 0)
    grad_gates = gates.new_zeros(gates.shape if need_gates else 0)
    for block, rows, entries in _rows_by_block(gates, indices):
        outs, ins = grid.slices(block)
        gate = gates[rows, entries, None]
        from_block = grad[rows, outs] @ weight[outs, ins]
        if need_gates:
            grad_gates[rows, entries] = (from_block * x[rows, ins]).sum(-1)
        if need_x:
            grad_x[:, ins].index_add_(0, rows, gate * from_block)
        if need_weight:
            grad_weight[outs, ins] = (gate * grad[rows, outs]).T @ x[rows, ins]
    return grad_x, grad_weight, grad_gates


def _checked_grid(weight: Tensor, indices: Tensor, block_out: int, block_in: int) -> BlockGrid:
    """The weight's grid, once every index is known to lie in it."""
    grid = BlockGrid(weight.shape[0], weight.shape[1], (block_out, block_in))
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < grid.num_blocks:
        raise invalid(
            "block indices",
            expected=f"values from 0 to {grid.num_blocks - 1}",
            got=(int(indices.min()), int(indices.max())),
            remedy="An index is row * in_blocks + column in the block grid.",
        )
    return grid


def _rows_by_block(gates: Tensor, indices: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For every block that any row opens: its index, the rows that open it, and where in those rows its gate stands."""
    rows, entries = torch.nonzero(gates, as_tuple=True)
    blocks, order = torch.sort(indices[rows, entries], stable=True)
    present, counts = torch.unique_consecutive(blocks, return_counts=True)
    chunks = torch.split(order, counts.tolist())
    for block, chunk in zip(present.tolist(), chunks, strict=True):
        yield block, rows[chunk], entries[chunk]
