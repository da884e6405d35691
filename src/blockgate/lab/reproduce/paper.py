"""The numbers that the paper prints, by arm: test perplexity, or test error as a share."""

from __future__ import annotations

__all__ = ["PAPER"]

PAPER: dict[str, float] = {
    # About 2% after 21 epochs, dense and dynamic alike.
    "mnist-dense": 0.02,
    "mnist-dynamic-90": 0.02,
    # Table 1.
    "ptb-qrnn-dense": 54.93,
    "ptb-qrnn-dynamic-50": 56.17,
    "ptb-qrnn-dynamic-60": 57.93,
    "ptb-qrnn-dynamic-80": 60.70,
    "ptb-qrnn-dynamic-90": 63.59,
    "ptb-qrnn-small-50": 57.23,
    "ptb-qrnn-small-60": 58.76,
    "ptb-qrnn-small-80": 60.82,
    "ptb-qrnn-small-90": 64.08,
    # Table 2.
    "ptb-lstm-dense": 78.57,
    "ptb-lstm-dynamic-50": 78.50,
    "ptb-lstm-dynamic-75": 79.12,
    "ptb-lstm-dynamic-90": 80.34,
    "ptb-lstm-agp-50": 80.92,
    "ptb-lstm-agp-75": 81.06,
    "ptb-lstm-agp-90": 81.75,
    "wikitext-2-lstm-dense": 85.0,
    "wikitext-2-lstm-dynamic-50": 85.31,
    "wikitext-2-lstm-dynamic-75": 86.76,
    "wikitext-2-lstm-dynamic-90": 88.44,
    "wikitext-2-lstm-agp-50": 86.91,
    "wikitext-2-lstm-agp-75": 88.45,
    "wikitext-2-lstm-agp-90": 89.48,
}
