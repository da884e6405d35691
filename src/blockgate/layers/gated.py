"""What gated layers share, packed or not: their sparsity, and a look at their gates."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from blockgate.gating import Gate
    from blockgate.grid import BlockGrid

__all__ = ["GatedLinear"]


class GatedLinear:
    """A linear layer with a gate over its block grid; mixed into an nn.Module that has both."""

    gate: Gate
    grid: BlockGrid

    @property
    def in_features(self) -> int:
        """Size of the last dimension of the input."""
        return self.grid.in_features

    @property
    def out_features(self) -> int:
        """Size of the last dimension of the output."""
        return self.grid.out_features

    @property
    def sparsity(self) -> float:
        """Share of blocks that is to stay closed. Assign to change it, at any time."""
        return self.gate.target_sparsity

    @sparsity.setter
    def sparsity(self, sparsity: float) -> None:
        self.gate.target_sparsity = sparsity

    def gates(self, x: Tensor) -> Tensor:
        """The gates that x (..., in_features) gets: (..., out_blocks, in_blocks), 0 where closed."""
        self._check_input(x)
        gates = self.gate.dense(x.reshape(-1, self.in_features))
        return gates.view(*x.shape[:-1], self.grid.out_blocks, self.grid.in_blocks)

    @abstractmethod
    def _check_input(self, x: Tensor) -> None:
        """Raises a clear error if x doesn't fit this layer."""
