"""What the recurrences on a GPU share: the gated product of the state at every step, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from blockgate.ops.gate_scores.triton import scores_into
from blockgate.ops.gated_linear.triton import gated_linear, gated_linear_backward
from blockgate.ops.topk_gates.triton import select_backward_into, select_into

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["UNITS", "Steps", "StepsBackward", "tanh"]

# Units of the state that a program of a cell computes.
UNITS = 256


@triton.jit
def tanh(x):
    """By the one function of this kind that every target has."""
    return 2 * tl.sigmoid(2 * x) - 1


class Steps:
    """The gated product of each step, and what it decided on the way, kept for the backward pass.

    Args:
        first: the state before the first step, (N, H).
        count: T.
        gate: the gate's weight, bias, hidden weight and hidden bias.
        weight, bias, key, block, selection, normalise: see `gated_lstm`.
    """

    def __init__(
        self,
        first: Tensor,
        count: int,
        weight: Tensor,
        bias: Tensor | None,
        gate: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
        key: Sequence[int],
        block: Sequence[int],
        selection: Sequence[int],
        normalise: str,
    ) -> None:
        rows, (scoring, _, hidden_weight, _) = len(first), gate
        self.weight, self.bias, self.gate = weight, bias, gate
        self.columns, self.block = slice(key[0], key[0] + key[1]), block
        self.selection, self.normalise = selection, normalise
        self.hidden = first.new_empty(0 if hidden_weight is None else (count, rows, len(hidden_weight)))
        self.scores = first.new_empty(count, rows, len(scoring))
        self.gates = first.new_empty(count, rows, selection[0] * selection[1])
        self.indices = self.gates.new_empty(self.gates.shape, dtype=torch.int64)

    def product(self, t: int, h: Tensor) -> Tensor:
        """The state's sums at step t, from the state before it."""
        scoring, bias, hidden_weight, hidden_bias = self.gate
        scored = h[:, self.columns]
        if hidden_weight is not None:
            scores_into(self.hidden[t], scored, hidden_weight, hidden_bias)
            scored = self.hidden[t].relu_()
        scores_into(self.scores[t], scored, scoring, bias)
        select_into(self.gates[t], self.indices[t], self.scores[t], self.selection, self.normalise)
        return gated_linear(h, self.weight, self.bias, self.gates[t], self.indices[t], self.block)

    @property
    def kept(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the backward pass needs of the gate."""
        return self.hidden, self.scores, self.gates, self.indices


class StepsBackward:
    """The gradients of `Steps`, step by step.

    Args:
        before: the states before each step, (T, N, H).
        grad_sums: (T, N, gates * H), which the cell fills.
        kept: `Steps.kept`.
        weight, gate_weight, hidden_weight, key, block, selection, normalise: see `gated_lstm_backward`.
    """

    def __init__(
        self,
        before: Tensor,
        grad_sums: Tensor,
        weight: Tensor,
        gate_weight: Tensor,
        hidden_weight: Tensor | None,
        kept: tuple[Tensor, Tensor, Tensor, Tensor],
        key: Sequence[int],
        block: Sequence[int],
        selection: Sequence[int],
        normalise: str,
    ) -> None:
        self.before, self.sums, self.kept = before, grad_sums, kept
        self.weight, self.gate_weight, self.hidden_weight = weight, gate_weight, hidden_weight
        self.columns, self.block = slice(key[0], key[0] + key[1]), block
        self.selection, self.normalise = selection, normalise
        self.hidden, self.scores = torch.empty_like(kept[0]), torch.empty_like(kept[1])

    def through(self, t: int) -> Tensor:
        """The gradient of the state before step t, through the product and through its gate."""
        hidden, scores, gates, indices = self.kept
        grad, _, grad_gates = gated_linear_backward(
            self.sums[t], self.before[t], self.weight, gates[t], indices[t], self.block, True, False, True
        )
        select_backward_into(self.scores[t], grad_gates, scores[t], gates[t], self.selection, self.normalise)
        through, last = self.scores[t], self.gate_weight
        if self.hidden_weight is not None:
            torch.mm(self.scores[t], self.gate_weight, out=self.hidden[t])
            through, last = self.hidden[t].masked_fill_(hidden[t] <= 0, 0), self.hidden_weight
        grad[:, self.columns].addmm_(through, last)
        return grad

    def of_weight(self, needed: bool) -> Tensor:
        """The gradient of the weight from all steps at once; empty if not needed."""
        if not needed:
            return self.weight.new_empty(0)
        sums, before, gates, indices = (t.flatten(0, 1) for t in (self.sums, self.before, *self.kept[2:]))
        return gated_linear_backward(sums, before, self.weight, gates, indices, self.block, False, True, False)[1]
