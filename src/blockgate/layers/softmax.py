"""An output layer over a vocabulary that is cheap for frequent words: an adaptive softmax."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockgate.errors import invalid
from blockgate.runtime.adaptive import likeliest_in_one_call

__all__ = ["AdaptiveSoftmax", "at_least_float32", "make_decoder"]


def at_least_float32(scores: Tensor) -> Tensor:
    """Scores in a type that a softmax over many of them can be trusted in."""
    return scores if scores.dtype == torch.float64 else scores.float()


def make_decoder(features: int, words: int, weight: Tensor | None) -> nn.Linear:
    """One score per word, by a weight (words, features) that may belong to an embedding."""
    # On "meta" it draws no random numbers: its weights are made here.
    decoder = nn.Linear(features, words, device="meta")
    if weight is None:
        weight = nn.Parameter(torch.empty(words, features).uniform_(-0.1, 0.1))
    decoder.weight = cast("nn.Parameter", weight)
    decoder.bias = nn.Parameter(torch.zeros(words))
    return decoder


class AdaptiveSoftmax(nn.Module):
    """Scores frequent words directly, rare ones in groups that are only looked into where the target lies in them.

    The method of Grave et al. (2017), as in nn.AdaptiveLogSoftmaxWithLoss, but with all words in one matrix of full
    width, so that it can be an embedding's. Words must be numbered by falling frequency.

    `pack` packs the matrix. `likeliest` is then one native call, which computes a group of rare words only where its
    score says that one of the likeliest words may be in it.

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
        self.decoder = make_decoder(features, words, weight)
        scale = 1 / math.sqrt(features)
        self.group_weight = nn.Parameter(torch.empty(len(cutoffs), features).uniform_(-scale, scale))
        self.group_bias = nn.Parameter(torch.zeros(len(cutoffs)))

    def forward(self, x: Tensor) -> Tensor:
        """Log-probabilities (N, words) for x (N, features)."""
        scores = at_least_float32(self.decoder(x))
        frequent, *rare = scores.split([end - begin for begin, end in itertools.pairwise([0, *self.bounds])], dim=-1)
        head = F.log_softmax(torch.cat([frequent, self._group_scores(x)], dim=-1), dim=-1)
        frequent, *groups = head.split([self.bounds[0], *[1] * len(rare)], dim=-1)
        tails = [group + F.log_softmax(tail, dim=-1) for group, tail in zip(groups, rare, strict=True)]
        return torch.cat([frequent, *tails], dim=-1)

    def likeliest(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Scores and numbers (N, k) of the likeliest words for x (N, features): log-probabilities but for a sum."""
        found = likeliest_in_one_call(self.decoder, self.group_weight, self.group_bias, self.bounds, x, k)
        return self(x).topk(k) if found is None else found

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Negative log-probability (N,) of each target (N,)."""
        if type(self.decoder) is not nn.Linear or self.decoder._forward_pre_hooks or self.decoder._forward_hooks:
            # Only a plain weight can be cut into groups: not a packed or a gated one, nor one that hooks change.
            return -self.forward(x).gather(-1, targets[:, None]).squeeze(-1)
        first = self.bounds[0]
        groups = torch.bucketize(targets, torch.tensor(self.bounds[:-1], device=targets.device), right=True)
        head = torch.cat([self._scores(x, 0, first), self._group_scores(x)], dim=-1)
        losses = F.cross_entropy(head, torch.where(groups == 0, targets, first + groups - 1), reduction="none")
        for group, (begin, end) in enumerate(itertools.pairwise(self.bounds), start=1):
            rows = (groups == group).nonzero().squeeze(1)
            inside = F.cross_entropy(self._scores(x[rows], begin, end), targets[rows] - begin, reduction="none")
            losses = losses.index_add(0, rows, inside)
        return losses

    def _group_scores(self, x: Tensor) -> Tensor:
        return at_least_float32(F.linear(x, self.group_weight, self.group_bias))

    def _scores(self, x: Tensor, begin: int, end: int) -> Tensor:
        """Scores of some of the words."""
        return at_least_float32(F.linear(x, self.decoder.weight[begin:end], self.decoder.bias[begin:end]))
