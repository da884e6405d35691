"""Output layers over a vocabulary: the full softmax, and an adaptive one that is cheap for frequent words."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from blockgate.layers.softmax import AdaptiveSoftmax, at_least_float32, make_decoder
from blockgate.runtime.screened import ScreenedLinear

__all__ = ["AdaptiveSoftmax", "FullSoftmax", "at_least_float32"]


class FullSoftmax(nn.Module):
    """One score per word.

    Args:
        features: of the input.
        words: size of the vocabulary.
        weight: (words, features), shared with an embedding; None for one of its own.
    """

    def __init__(self, features: int, words: int, weight: Tensor | None = None) -> None:
        super().__init__()
        self.decoder = make_decoder(features, words, weight)

    def forward(self, x: Tensor) -> Tensor:
        """Log-probabilities (N, words) for x (N, features)."""
        return F.log_softmax(at_least_float32(self.decoder(x)), dim=-1)

    def likeliest(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Scores and numbers (N, k) of the likeliest words for x (N, features): log-probabilities but for a sum."""
        if isinstance(self.decoder, ScreenedLinear):
            return self.decoder.topk(x, k)
        return at_least_float32(self.decoder(x)).topk(k)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Negative log-probability (N,) of each target (N,)."""
        return F.cross_entropy(at_least_float32(self.decoder(x)), targets, reduction="none")
