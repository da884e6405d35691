"""The oracle: blocks chosen by what they truly contribute, which takes more work than to multiply them all.

No gate knows as much before the product is computed. A model trained with the oracle says what choosing well is worth,
a model with a fixed mask what not choosing is worth; where a gate lies between the two is its figure of merit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockgate.errors import invalid
from blockgate.gates import register_gate
from blockgate.gates.magnitude import contributions
from blockgate.gates.topk import TopKGate
from blockgate.ops import topk_gates

__all__ = ["OracleGate", "contributions", "recovered"]


@register_gate
class OracleGate(TopKGate):
    """Opens, in every row of blocks or among all, the k blocks whose product with the input has the largest norm.

    Gates are 1, and there is nothing to train in it.

    Args as in `Gate`; `GateSpec.select` is an option of this kind.
    """

    kind = "oracle"
    aliases = {}  # noqa: RUF012
    own_options = frozenset({"select"})

    def count_scores(self) -> int:
        """None that it would have to learn."""
        return 0

    def decide(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """As `forward`."""
        gates: tuple[Tensor, Tensor] = self(x, weight)
        return gates

    def forward(self, x: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compact gates and ascending block indices, (N, groups * open_blocks), for x (N, in_features)."""
        if weight is None:
            raise invalid(
                "oracle", expected="the weight of its layer", got="none", remedy="Call the layer; it can't be packed."
            )
        with torch.no_grad():
            scores = contributions(x, weight, self.grid)
            values, indices = topk_gates(
                scores, self.open_blocks, groups=self.groups, normalise="none", backend=self.backend
            )
        return torch.ones_like(values), indices

    def choices(self, x: Tensor) -> Tensor:  # noqa: ARG002
        """There are no scores to balance."""
        raise invalid("oracle", expected="a gate that learns", got="a balance loss", remedy="Leave it out.")

    def reset_near_dense(self, weight: Tensor | None = None) -> None:
        """Nothing to set: with all blocks open it is dense."""


def recovered(gate: float, static: float, oracle: float) -> float | None:
    """The share of oracle minus static that a gate recovers, from three scores of which less is better.

    None where the oracle is no better than the static mask: then there is nothing to recover.
    """
    return (static - gate) / (static - oracle) if oracle < static else None
