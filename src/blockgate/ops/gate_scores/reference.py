"""The scores in plain PyTorch: the judge of the native ones."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["centred_scores", "gate_scores"]


def gate_scores(key: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One linear layer of the gate: key (N, K), weight (S, K), bias (S) -> (N, S)."""
    return F.linear(key, weight, bias)


def centred_scores(key: Tensor, weight: Tensor, bias: Tensor, mean: Tensor) -> Tensor:
    """The same for key - mean, with mean (K)."""
    return gate_scores(key, weight, bias - (weight * mean).sum(1))
