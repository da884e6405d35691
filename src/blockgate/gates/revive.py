"""Blocks that no input opens any more: found by their gradients, and brought back."""

from __future__ import annotations

import torch
from torch import nn

from blockgate.errors import invalid
from blockgate.gates.base import Gate

__all__ = ["revive_blocks"]


@torch.no_grad()
def revive_blocks(model: nn.Module, step: float) -> int:
    """Raises the bias of blocks that no row of the last batch opened, until one does; then training decides again.

    A closed block has no gradient, so that training alone never brings it back. The gradient of the gate's bias tells:
    it is exactly 0 where no row opened the block, nor, with margin gates, had it as the runner-up. Call it after
    `backward` and before `zero_grad`; in data-parallel training, after gradients were averaged, it tells of the rows of
    all processes. A step below the learning rate of the gates is gentle.

    Args:
        model: with gated layers.
        step: what to add to the bias of such a block.

    Returns:
        How many scores had no gradient: one for each such block, in all kinds but softmax_sum.
    """
    if not isinstance(step, (int, float)) or not 0 <= step < float("inf"):
        raise invalid("step", expected="a number from 0 on", got=step, remedy="Try a third of the learning rate.")
    found = torch.zeros((), dtype=torch.int64)
    for gate in model.modules():
        if isinstance(gate, Gate) and gate.bias.grad is not None:
            unseen = gate.bias.grad == 0
            gate.bias.add_(unseen, alpha=step)
            found = found.to(unseen.device) + unseen.sum()
    return int(found)
