"""Gates that measure by how much a block was chosen: a block opens from 0, and no block can die by drifting."""

from __future__ import annotations

import math

from torch import nn

from blockgate.gates.registry import register_gate
from blockgate.gates.topk import TopKGate
from blockgate.spec import GateSpec

__all__ = ["MarginGate"]

# How far the scores of a gate made for a trained dense layer lie apart, in standard deviations for a unit input: far
# less than the floor that the rule adds where all blocks are open.
NEAR_DENSE_SPREAD = 2e-5


@register_gate
class MarginGate(TopKGate):
    """Opens the k largest scores; a gate is the distance to the largest score that stays closed, scaled to rms 1.

    Exactly k blocks open, whatever the signs of the scores. A block that is about to change has the value 0, adding a
    constant to all scores changes nothing, and the runner-up gets a gradient: so blocks come and go without a jump, and
    a closed block is pulled in as soon as the open ones lose by it.

    Args as in `Gate`; `GateSpec.select` is an option of this kind.
    """

    kind = "margin"
    aliases = {}  # noqa: RUF012
    own_options = frozenset({"select"})
    native = True

    def _take(self, spec: GateSpec) -> None:
        super()._take(spec)
        self._normalise = "margin"

    def reset_near_dense(self) -> None:
        """Scores that differ by little: with all blocks open gates are then near 1."""
        self.reset_parameters()
        nn.init.normal_(self.weight, std=NEAR_DENSE_SPREAD / math.sqrt(self.weight.shape[1]))
