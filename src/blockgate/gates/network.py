"""The weights that score blocks."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["GateNetwork"]


class GateNetwork(NamedTuple):
    """The small network that scores blocks: weight and bias of the scores, and of the hidden layer if there is one."""

    weight: Tensor
    bias: Tensor
    hidden_weight: Tensor | None
    hidden_bias: Tensor | None
