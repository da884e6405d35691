"""The gated block product in plain PyTorch: slow, obvious, and the judge of every kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockgate.errors import invalid
from blockgate.grid import BlockGrid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["gated_linear", "gated_linear_backward"]


def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, gates: Tensor, indices: Tensor, block: Sequence[int]
) -> Tensor:
    """The gated block product: x (N, n), weight (m, n), bias (m), gates and indices (N, E) -> y (N, m).

    `block` is (out, in). One open block at a time, over the rows that open it: memory grows with N * m, never with
    N * m * n.
    """
    grid = _checked_grid(weight, indices, block)
    y = x.new_zeros(x.shape[0], grid.out_features)
    if bias is not None:
        y = y + bias
    for index, rows, entries in _rows_by_block(gates, indices):
        outs, ins = grid.slices(index)
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
    block: Sequence[int],
    need_x: bool,
    need_weight: bool,
    need_gates: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (N, n), weight (m, n) and gates (N, E) from that of y (N, m); an empty tensor if not needed."""
    grid = _checked_grid(weight, indices, block)
    grad_x = x.new_zeros(x.shape if need_x else 0)
    grad_weight = weight.new_zeros(weight.shape if need_weight else 0)
    grad_gates = gates.new_zeros(gates.shape if need_gates else 0)
    for index, rows, entries in _rows_by_block(gates, indices):
        outs, ins = grid.slices(index)
        gate = gates[rows, entries, None]
        from_block = grad[rows, outs] @ weight[outs, ins]
        if need_gates:
            grad_gates[rows, entries] = (from_block * x[rows, ins]).sum(-1)
        if need_x:
            grad_x[:, ins].index_add_(0, rows, gate * from_block)
        if need_weight:
            grad_weight[outs, ins] = (gate * grad[rows, outs]).T @ x[rows, ins]
    return grad_x, grad_weight, grad_gates


def _checked_grid(weight: Tensor, indices: Tensor, block: Sequence[int]) -> BlockGrid:
    """The weight's grid, once every index is known to lie in it."""
    grid = BlockGrid(weight.shape[0], weight.shape[1], (block[0], block[1]))
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
