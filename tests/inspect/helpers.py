"""Gated layers whose decisions are known, because their gates are set by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import blockgate as bg

# Every kind of gate, as options of a layer that closes some blocks where the kind can.
GATE_OPTIONS = {
    "topk": {"sparsity": 0.5, "gate": "topk"},
    "per_row": {"sparsity": 0.5, "gate": "topk", "select": "per_row"},
    "softmax_sum": {"sparsity": 0.5, "gate": "softmax_sum"},
    "sigmoid": {"sparsity": 0.0, "gate": "sigmoid"},
}


def layer_that_opens(patterns: list[list[int]], blocks: tuple[int, int] = (2, 2)) -> bg.DynamicSparseLinear:
    """A layer of `blocks` (r, c) where the one-hot input number i opens the blocks of patterns[i], each with value 1.

    The number of inputs is the larger of len(patterns) and c; unused features open nothing.
    """
    rows, columns = blocks
    width = max(len(patterns), columns)
    block = (2, -(-width // columns))
    options = {"key_size": None, "normalise": "none", "select": "global"}
    layer = bg.DynamicSparseLinear(width, 2 * rows, block_size=block, sparsity=0.0, **options)
    assert (layer.grid.out_blocks, layer.grid.in_blocks) == blocks
    with torch.no_grad():
        layer.gate.bias.fill_(-1.0)
        layer.gate.weight.zero_()
        for number, pattern in enumerate(patterns):
            layer.gate.weight[pattern, number] = 2.0
    return layer


def inputs(layer: bg.DynamicSparseLinear, numbers: list[int]) -> Tensor:
    """One-hot rows that make `layer_that_opens` open the patterns of these numbers."""
    return nn.functional.one_hot(torch.tensor(numbers), layer.in_features).float()


def small_net(**options: object) -> nn.Sequential:
    """Two gated layers with ragged grids between plain ones: 6 -> 10 -> 9 -> 3."""
    options = {"block_size": (4, 3), "key_size": 4, **options}
    return nn.Sequential(
        nn.Linear(6, 10),
        nn.ReLU(),
        bg.DynamicSparseLinear(10, 9, **options),
        nn.LayerNorm(9),
        bg.DynamicSparseLinear(9, 3, bias=False, **options),
    )


def run_and_fail(layer: bg.DynamicSparseLinear, numbers: list[int]) -> None:
    """Calls the layer, and ends in an error that is none of ours."""
    layer(inputs(layer, numbers))
    raise ZeroDivisionError
