"""The paper's gate and its better relatives: ReLU scores, the k largest kept, scaled to a common size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockgate.gates.base import Gate
from blockgate.gates.magnitude import block_mean_square
from blockgate.gates.registry import register_gate
from blockgate.grid import BlockGrid, open_blocks
from blockgate.ops import topk_gates
from blockgate.spec import GateSpec

__all__ = ["TopKGate"]

# With fewer columns of blocks, rounding to whole blocks in every row would decide the sparsity: of two blocks in a row
# one stays open, whatever is asked for.
LEAST_COLUMNS = 4


# How far scores of large and small blocks of a trained weight lie apart at first, in standard deviations.
MAGNITUDE_SPREAD = 0.03


@register_gate
class TopKGate(Gate):
    """Opens the blocks with the k largest positive scores: of all blocks, or of each row of blocks.

    Args as in `Gate`; `GateSpec.normalise` and `GateSpec.select` are options of this kind.
    """

    kind = "topk"
    # The paper's gate as printed; one word for two options.
    aliases = {"eq1": {"normalise": "mean", "select": "global"}}  # noqa: RUF012
    own_options = frozenset({"normalise", "select"})
    native = True

    def _take(self, spec: GateSpec) -> None:
        super()._take(spec)
        self._normalise = self._spec.normalise or "rms"
        self._select = self._spec.select or _default_select(self.grid)
        self._groups = self.grid.out_blocks if self._select == "per_row" else 1

    @property
    def normalise(self) -> str:
        """What becomes 1 over all gates, closed ones included: "rms", "mean", or "none"."""
        return self._normalise

    @property
    def select(self) -> str:
        """Where it chooses: "per_row" or "global"."""
        return self._select

    @property
    def groups(self) -> int:
        """How many equal runs of blocks it chooses in: 1, or one per row of blocks."""
        return self._groups

    @property
    def group_size(self) -> int:
        """How many blocks it chooses from at once."""
        return self.grid.num_blocks // self._groups

    @property
    def rule(self) -> tuple[Any, ...]:
        """As for every gate, with the choices that this kind has."""
        return (*super().rule, self._normalise, self._select)

    def count_open(self, sparsity: float) -> int:
        """How many blocks to keep per group: the whole grid, or one row of it."""
        return open_blocks(sparsity, self.grid.num_blocks // self.groups)

    @property
    def target_density(self) -> float:
        """The share of blocks that open when enough scores are positive; rounding to whole blocks included."""
        return self.groups * self.open_blocks / self.grid.num_blocks

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compact gates and ascending block indices, (N, groups * open_blocks), for x (N, in_features)."""
        return topk_gates(
            self.scores(x), self.open_blocks, groups=self.groups, normalise=self.normalise, backend=self.backend
        )

    @torch.no_grad()
    def reset_near_dense(self, weight: Tensor | None = None) -> None:
        """Gates close to 1; the larger the entries of a block, the larger its score, so that small ones close first."""
        super().reset_near_dense(weight)
        if weight is not None:
            sizes = block_mean_square(weight, self.grid).sqrt().view(self.groups, -1)
            spread = (sizes - sizes.mean(1, keepdim=True)) / sizes.std(1, correction=0, keepdim=True).clamp(min=1e-30)
            self.bias.add_(spread.flatten(), alpha=MAGNITUDE_SPREAD)

    def choices(self, x: Tensor) -> Tensor:
        """Scores (N, groups, blocks of a group) for x (N, in_features)."""
        return self.scores(x).view(len(x), self.groups, -1)

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return f"{super().extra_repr()}, normalise={self.normalise}, select={self.select}"


def _default_select(grid: BlockGrid) -> str:
    """How the blocks of a grid are chosen where nothing is said."""
    return "per_row" if grid.in_blocks >= LEAST_COLUMNS else "global"
