"""Serve an LSTM language model token by token, with its state carried on: what decoding costs, dense and gated.

    python examples/serve_lstm.py

The weights are random, since only the time is of interest here; `blockgate train` trains such models.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import blockgate as bg


class LanguageModel(nn.Module):
    """Embedding, LSTM, decoder: words (time, batch) and a state in, scores and the next state out."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, 2)
        self.decoder = nn.Linear(width, words)

    def forward(self, words: torch.Tensor, state: tuple | None = None) -> tuple[torch.Tensor, tuple]:
        """Scores (time, batch, words) and the state to carry on."""
        y, state = self.lstm(self.embedding(words), state)
        return self.decoder(y), state


@torch.inference_mode()
def generate(model: nn.Module, tokens: int) -> tuple[list[int], float]:
    """Greedy words, one after the other, and how many come in a second."""
    word, state, words = torch.zeros(1, 1, dtype=torch.long), None, []
    model(word)  # the first call prepares
    begin = time.perf_counter()
    for _ in range(tokens):
        scores, state = model(word, state)
        word = scores.argmax(-1)
        words.append(int(word))
    return words, tokens / (time.perf_counter() - begin)


def main(words: int, width: int, tokens: int) -> None:
    """The dense model, then gated at several sparsities and packed."""
    torch.manual_seed(0)
    dense = LanguageModel(words, width).eval()
    # For single tokens torch is much faster without oneDNN, which packs all weights anew on every call: a fair rival.
    before = torch.backends.mkldnn.set_flags(False)[0]
    _, dense_rate = generate(dense, tokens)
    torch.backends.mkldnn.set_flags(before)
    print(f"dense, torch:             {dense_rate:8.0f} tokens/s")
    _, packed_rate = generate(bg.pack(dense, torch.int8), tokens)
    print(f"dense, packed to int8:    {packed_rate:8.0f} tokens/s  {packed_rate / dense_rate:.1f}x")
    bg.sparsify_(dense, block_size=64, sparsity=0.5)
    for sparsity in (0.5, 0.75, 0.9):
        bg.set_sparsity(dense, sparsity)
        _, rate = generate(bg.pack(dense, torch.int8), tokens)
        print(
            f"{sparsity:.0%} closed, packed, int8: {rate:8.0f} tokens/s  {rate / dense_rate:.1f}x"
            f", {rate / packed_rate:.2f}x of dense packed"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=100)
    main(**vars(parser.parse_args()))
