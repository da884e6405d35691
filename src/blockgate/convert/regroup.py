"""Hidden channels of MLPs put into an order in which those that are active together share a block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockgate.convert.closeness import call, evaluating
from blockgate.convert.pairs import Pair, find_pairs
from blockgate.errors import invalid
from blockgate.grid import check_size
from blockgate.layers.conv1d import stores_transposed

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["regroup"]

# Rows of one batch that count, at most.
MOST_ROWS = 1024
# How often channels are dealt out to groups whose centres are then taken anew.
ROUNDS = 8


@torch.no_grad()
def regroup(model: nn.Module, batches: Iterable[Any], *, block: int = 32) -> dict[str, tuple[float, float]]:
    """Permutes the hidden channels of every MLP of a dense model, so that blocks hold channels that act together.

    What a channel adds to the output, in size, is followed over the batches; channels whose sizes rise and fall
    together are put into one block, by k-means with groups of equal size. The rows of the up (and gate) projection,
    their biases and the columns of the down projection move alike, so that the model computes what it did, but for the
    rounding of sums in another order. Call it before `sparsify_(model, paired=block)`.

    Args:
        model: dense, with MLPs that `sparsify_` would pair. Weights are written in place.
        batches: a few hundred inputs or more: tensors, tuples of arguments, or dicts of keyword arguments.
        block: hidden channels of a block.

    Returns:
        By MLP, the share of the squared sizes in the better half of the blocks of each row, before and after: what a
        perfect gate could keep at a sparsity of 50%.
    """
    block = check_size("block", block)
    pairs = find_pairs(model)
    kept = [] if isinstance(batches, (Tensor, dict)) else list(batches)
    if not pairs or not kept:
        raise invalid(
            "regroup",
            expected="a dense model with MLPs that sparsify_ can pair, and a list of inputs",
            got=f"{len(pairs)} such MLPs, {type(batches).__name__}",
            remedy="Call it before sparsify_; put a single input in a list.",
        )
    seen: dict[Pair, list[Tensor]] = {pair: [] for pair in pairs}
    handles = [pair.down.register_forward_pre_hook(_Watch(seen[pair])) for pair in pairs]
    try:
        with evaluating(model):
            for batch in kept:
                call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    shares = {}
    for pair, rows in seen.items():
        if not rows:
            raise invalid("batches", expected="inputs that reach every MLP", got=f"none for {pair.name}", remedy="Add.")
        sizes = torch.cat(rows).abs() * _matrix(pair.down).float().norm(dim=0).cpu()
        order = _order(sizes, block)
        shares[pair.name] = (_better_half(sizes, block), _better_half(sizes[:, order], block))
        _permute(pair, order)
    return shares


class _Watch:
    """Keeps some of the rows that a layer reads."""

    def __init__(self, rows: list[Tensor]) -> None:
        self.rows = rows

    def __call__(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        rows = args[0].detach().reshape(-1, args[0].shape[-1])
        self.rows.append(rows[:: max(1, -(-len(rows) // MOST_ROWS))].float().cpu())


def _order(sizes: Tensor, block: int) -> Tensor:
    """The order (H) in which channels with sizes (N, H) lie by groups."""
    channels = sizes.shape[1]
    groups = -(-channels // block)
    # Directions in the space of rows: what counts is when a channel is large, not how large.
    points = sizes - sizes.mean(0)
    points = (points / points.norm(dim=0).clamp(min=1e-12)).T
    room = torch.full((groups,), block)
    room[-1] = channels - (groups - 1) * block
    centres = points[_spread_out(points, groups)]
    owner = torch.zeros(channels, dtype=torch.long)
    for _ in range(ROUNDS):
        owner = _deal(points @ centres.T, room)
        sums = torch.zeros_like(centres).index_add_(0, owner, points)
        centres = sums / sums.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return owner.argsort(stable=True)


def _spread_out(points: Tensor, count: int) -> list[int]:
    """Channels to start groups from, each the one that is least like all before."""
    chosen = [0]
    nearest = points @ points[0]
    while len(chosen) < count:
        nearest[chosen] = torch.inf
        chosen.append(int(nearest.argmin()))
        nearest = torch.maximum(nearest, points @ points[chosen[-1]])
    return chosen


def _deal(likeness: Tensor, room: Tensor) -> Tensor:
    """For every channel its group, by likeness (H, groups), best pairs first, until groups are full."""
    owner = torch.full((len(likeness),), -1)
    left, free = room.clone(), torch.arange(len(likeness))
    likeness = likeness.clone()
    while len(free):
        best, wanted = likeness[free].max(1)
        for i in best.argsort(descending=True, stable=True).tolist():
            group = int(wanted[i])
            if left[group] > 0:
                owner[free[i]] = group
                left[group] -= 1
        likeness[:, left == 0] = -torch.inf
        free = (owner < 0).nonzero().flatten()
    return owner


def _better_half(sizes: Tensor, block: int) -> float:
    """The share of squares (N, H) in the larger half of the blocks of every row."""
    channels = sizes.shape[1]
    squares = torch.nn.functional.pad(sizes.square(), (0, -channels % block)).unflatten(1, (-1, block)).sum(2)
    kept = squares.topk(-(-squares.shape[1] // 2), dim=1).values.sum(1)
    return float((kept / squares.sum(1).clamp(min=1e-30)).mean())


def _permute(pair: Pair, order: Tensor) -> None:
    for layer in pair.layers:
        weight = _matrix(layer)
        order = order.to(weight.device)
        if layer is pair.down:
            weight.copy_(weight[:, order])
            continue
        weight.copy_(weight[order])
        if isinstance(layer.bias, Tensor):
            layer.bias.copy_(layer.bias[order])


def _matrix(layer: Any) -> Tensor:
    """The weight (out, in), in the memory of the layer."""
    weight: Tensor = layer.weight.detach()
    return weight.t() if stores_transposed(layer) else weight
