"""The scores in plain PyTorch: the judge of the native ones."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["gate_scores"]


def gate_scores(key: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One linear layer of the gate: key (N, K), weight (S, K), bias (S) -> (N, S)."""
    return F.linear(key, weight, bias)
