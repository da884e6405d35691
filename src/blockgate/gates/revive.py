"""Blocks that no row opens get no gradient; this brings them back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockgate.errors import invalid
from blockgate.gates.base import Gate

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BlockReviver"]


class BlockReviver:
    """Raises the bias of blocks that no row has opened for long, until one does; then training decides again.

    A closed block has no gradient, so that training alone never brings it back. The gradient of the gate's bias tells:
    it is exactly 0 where no row opened the block, nor, with margin gates, had it as the runner-up. In data-parallel
    training, after gradients were averaged, it tells of the rows of all processes.

    Blocks that serve rare inputs rest for many batches and are none the worse for it. Raising them, too, made training
    of a language model run away; so only those count as dead that rested for `patience` updates in a row.

    Args:
        model: with gated layers.
        patience: updates in a row without any gradient after which a block counts as dead.
    """

    def __init__(self, model: nn.Module, patience: int = 100) -> None:
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 0:
            raise invalid("patience", expected="a number of updates from 0 on", got=patience, remedy="Try 100.")
        self.model, self.patience = model, patience
        self._unseen: dict[str, Tensor] = {}  # by the name of the gate: updates in a row without a gradient

    @torch.no_grad()
    def step(self, amount: float) -> int:
        """Counts one update; call it after `backward` and before `zero_grad`.

        Args:
            amount: what to add to the bias of a dead block. Less than the learning rate of the gates is gentle.

        Returns:
            How many scores were raised: one for each dead block, in all kinds but softmax_sum.
        """
        if not isinstance(amount, (int, float)) or not 0 <= amount < float("inf"):
            raise invalid("amount", expected="a number from 0 on", got=amount, remedy="Try a third of the rate.")
        raised = []
        for name, gate in self._gates():
            if gate.bias.grad is None:
                continue
            unseen = self._unseen.get(name)
            if unseen is None:
                unseen = torch.zeros_like(gate.bias.grad, dtype=torch.int64)
            self._unseen[name] = unseen = torch.where(gate.bias.grad == 0, unseen + 1, 0)
            dead = unseen > self.patience
            gate.bias.add_(dead.to(gate.bias.dtype), alpha=amount)
            raised.append(dead.sum())
        return sum(int(count) for count in raised)

    def _gates(self) -> list[tuple[str, Gate]]:
        return [(name, module) for name, module in self.model.named_modules() if isinstance(module, Gate)]

    def state_dict(self) -> dict[str, Any]:
        """The counts, for checkpoints: training goes on from them as if it had not been stopped."""
        return {"unseen": {name: count.clone() for name, count in self._unseen.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from the counts of a checkpoint; one from before there were counts starts again."""
        gates = dict(self._gates())
        counts = state.get("unseen", {})
        for name, count in counts.items():
            if name not in gates or gates[name].bias.shape != count.shape:
                raise invalid(
                    "counts of unseen blocks",
                    expected="those of the gates of this model",
                    got=f"{name!r} of shape {tuple(count.shape)}",
                    remedy="Load the checkpoint of the same model.",
                )
        self._unseen = {name: count.to(gates[name].bias.device) for name, count in counts.items()}
