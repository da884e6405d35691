"""The paper's gate and its better relatives: ReLU scores, the k largest kept, scaled to a common size."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from blockgate.errors import invalid
from blockgate.gates.base import Gate
from blockgate.grid import BlockGrid, open_blocks
from blockgate.ops import NORMALISE, topk_gates

__all__ = ["SELECT", "TopKGate", "default_select"]

SELECT = ("global", "per_row")

# With fewer columns of blocks, rounding to whole blocks in every row would decide the sparsity: of two blocks in a row
# one stays open, whatever is asked for.
LEAST_COLUMNS = 4


def default_select(grid: BlockGrid) -> str:
    """How the blocks of a grid are chosen where nothing is said."""
    return "per_row" if grid.in_blocks >= LEAST_COLUMNS else "global"


class TopKGate(Gate):
    """Opens the blocks with the k largest positive scores.

    Args:
        grid: the grid whose blocks it opens.
        normalise: "rms", "mean" (Eq. 1 of the paper) or "none": what becomes 1 over all gates, closed ones included.
        select: "per_row": the same number in every row of blocks; "global": k of all blocks, as in the paper. None:
            per row, but among all where a row has fewer than 4 blocks.
        options: those of `Gate`.
    """

    kind = "topk"

    def __init__(self, grid: BlockGrid, *, normalise: str = "rms", select: str | None = None, **options: Any) -> None:
        select = default_select(grid) if select is None else select
        if normalise not in NORMALISE:
            raise invalid("normalise", expected=f"one of {NORMALISE}", got=normalise, remedy="The paper uses 'mean'.")
        if select not in SELECT:
            raise invalid("select", expected=f"one of {SELECT}", got=select, remedy="The paper uses 'global'.")
        self.normalise = normalise
        self.select = select
        self.groups = grid.out_blocks if select == "per_row" else 1
        self._group_size = grid.num_blocks // self.groups
        super().__init__(grid, grid.num_blocks, **options)

    def count_open(self, sparsity: float) -> int:
        """How many blocks to keep per group: the whole grid, or one row of it."""
        return open_blocks(sparsity, self._group_size)

    @property
    def target_density(self) -> float:
        """The share of blocks that open when enough scores are positive; rounding to whole blocks included."""
        return self.groups * self.open_blocks / self.grid.num_blocks

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compact gates and ascending block indices, (N, groups * open_blocks), for x (N, in_features)."""
        return topk_gates(
            self.scores(x), self.open_blocks, groups=self.groups, normalise=self.normalise, backend=self.backend
        )

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return f"{super().extra_repr()}, normalise={self.normalise}, select={self.select}"
