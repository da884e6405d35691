"""Output layers over a vocabulary: the full softmax, and an adaptive one that is cheap for frequent words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockgate.errors import invalid

__all__ = ["AdaptiveSoftmax", "FullSoftmax", "at_least_float32"]


def at_least_float32(scores: Tensor) -> Tensor:
    """Scores in a type that a softmax over many of them can be trusted in."""
    return scores if scores.dtype == torch.float64 else scores.float()


class FullSoftmax(nn.Module):
    """One score per word.

    Args:
        features: of the input.
        words: size of the vocabulary.
        weight: (words, features), shared with an embedding; None for one of its own.
    """

    def __init__(self, features: int, words: int, weight: Tensor | None = None) -> None:
        super().__init__()
        self.decoder = nn.Linear(features, words, device=None if weight is None else "meta")
        if weight is None:
            nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        else:
            self.decoder.weight = cast("nn.Parameter", weight)
            self.decoder.bias = nn.Parameter(torch.empty(words))
        nn.init.zeros_(self.decoder.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Log-probabilities (N, words) for x (N, features)."""
        return F.log_softmax(at_least_float32(self.decoder(x)), dim=-1)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Negative log-probability (N,) of each target (N,)."""
        return F.cross_entropy(at_least_float32(self.decoder(x)), targets, reduction="none")


class AdaptiveSoftmax(nn.Module):
    """Scores frequent words directly, rare ones in groups that are only looked into where the target lies in them.

    The method of Grave et al. (2017), as in nn.AdaptiveLogSoftmaxWithLoss, but with all words in one matrix of full
    width, so that it can be an embedding's. Words must be numbered by falling frequency.

    Args:
        features: of the input.
        words: size of the vocabulary.
        cutoffs: where the groups of rarer words begin, rising: (2000, 8000) makes two.
        weight: (words, features), shared with an embedding; None for one of its own.
    """

    def __init__(self, features: int, words: int, cutoffs: Sequence[int], weight: Tensor | None = None) -> None:
        super().__init__()
        bounds = [*cutoffs, words]
        if not cutoffs or bounds[0] < 1 or any(a >= b for a, b in itertools.pairwise(bounds)):
            raise invalid(
                "cutoffs",
                expected=f"rising numbers from 1 to {words - 1}, below the size of the vocabulary",
                got=tuple(cutoffs),
                remedy="Try a fifth of the vocabulary, or no cutoffs for the full softmax.",
            )
        self.bounds = bounds
        if weight is None:
            weight = nn.Parameter(torch.empty(words, features).uniform_(-0.1, 0.1))
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(words))
        scale = 1 / math.sqrt(features)
        self.group_weight = nn.Parameter(torch.empty(len(cutoffs), features).uniform_(-scale, scale))
        self.group_bias = nn.Parameter(torch.zeros(len(cutoffs)))

    def forward(self, x: Tensor) -> Tensor:
        """Log-probabilities (N, words) for x (N, features)."""
        first = self.bounds[0]
        head = F.log_softmax(self._head(x), dim=-1)
        tails = [
            head[:, first + group, None] + F.log_softmax(self._tail(x, group), dim=-1)
            for group in range(len(self.bounds) - 1)
        ]
        return torch.cat([head[:, :first], *tails], dim=-1)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Negative log-probability (N,) of each target (N,)."""
        first = self.bounds[0]
        groups = torch.bucketize(targets, torch.tensor(self.bounds[:-1], device=targets.device), right=True)
        losses = F.cross_entropy(self._head(x), torch.where(groups == 0, targets, first + groups - 1), reduction="none")
        for group in range(len(self.bounds) - 1):
            rows = (groups == group + 1).nonzero().squeeze(1)
            inside = F.cross_entropy(self._tail(x[rows], group), targets[rows] - self.bounds[group], reduction="none")
            losses = losses.index_add(0, rows, inside)
        return losses

    def _head(self, x: Tensor) -> Tensor:
        """Scores of the frequent words and of the groups."""
        first = self.bounds[0]
        frequent = F.linear(x, self.weight[:first], self.bias[:first])
        return at_least_float32(torch.cat([frequent, F.linear(x, self.group_weight, self.group_bias)], dim=-1))

    def _tail(self, x: Tensor, group: int) -> Tensor:
        """Scores of the words of a group."""
        words = slice(self.bounds[group], self.bounds[group + 1])
        return at_least_float32(F.linear(x, self.weight[words], self.bias[words]))
