"""Soft gating of every block, for comparison: nothing closes, so nothing is saved."""

from __future__ import annotations

import torch
from torch import Tensor

from blockgate.errors import invalid
from blockgate.gates.base import Gate
from blockgate.gates.registry import register_gate

__all__ = ["SigmoidGate", "all_blocks"]


@register_gate
class SigmoidGate(Gate):
    """All blocks open, with values sigmoid(score) scaled to mean 1. Its sparsity is 0."""

    kind = "sigmoid"

    def count_open(self, sparsity: float) -> int:
        """All blocks; any other sparsity is an error."""
        if sparsity != 0:
            raise invalid("sparsity", expected="0 with gate='sigmoid'", got=sparsity, remedy="Use gate='topk'.")
        return self.grid.num_blocks

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Gates and block indices, (N, num_blocks), for x (N, in_features)."""
        logarithms = torch.nn.functional.logsigmoid(self.scores(x))
        # Over the largest of each row, which the mean takes out again: far below 0 all of them would vanish.
        values = torch.exp(logarithms - logarithms.detach().amax(-1, keepdim=True))
        return values / values.mean(-1, keepdim=True), all_blocks(values)

    def use(self, choices: Tensor, open_counts: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Always an error: it has no use to balance."""
        raise invalid(
            "balance",
            expected="gates that close blocks",
            got=type(self).__name__,
            remedy="Pass only layers with gate='topk' or 'softmax_sum'.",
        )

    def reset_near_dense(self, weight: Tensor | None = None) -> None:
        """Equal gates from equal scores; where they lie doesn't matter after scaling."""
        super().reset_near_dense(weight)
        torch.nn.init.zeros_(self.bias)


def all_blocks(values: Tensor) -> Tensor:
    """Block indices (N, num_blocks) for gates that are all open; one row of memory."""
    return torch.arange(values.shape[1], device=values.device).expand(values.shape)
