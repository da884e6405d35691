"""Convert a model, train it with a ramp, see what it costs and what its gates do, pack it, time it.

The model predicts the next word of Python's documentation from the eight words before it; any nn.Module would do.

    python examples/sparsify_your_model.py
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn

import blockgate as bg
from blockgate.lab.data import Vocabulary, load_corpus

WORDS, CONTEXT = 1000, 8


def make_model(width: int) -> nn.Module:
    """Embeddings of the context side by side, two hidden layers, scores of the next word."""
    hidden = [nn.Linear(CONTEXT * 64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(nn.Embedding(WORDS, 64), nn.Flatten(), *hidden, nn.Linear(width, WORDS))


def train(model: nn.Module, text: torch.Tensor, steps: int, ramp: bg.SparsityRamp | None = None) -> None:
    """Adam on random batches; a ramp, if there is one, moves with every step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    windows = text.unfold(0, CONTEXT + 1, 1)
    for _ in range(steps):
        batch = windows[torch.randint(len(windows), (256,))]
        loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if ramp is not None:
            ramp.step()


@torch.no_grad()
def perplexity(model: nn.Module, text: torch.Tensor) -> float:
    """On text that the model has not seen."""
    windows = text.unfold(0, CONTEXT + 1, 1)
    return float(nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, -1]).exp())


@torch.inference_mode()
def microseconds(model: nn.Module, text: torch.Tensor) -> float:
    """Median time for one context at a time: what a user who types waits for."""
    contexts = text.unfold(0, CONTEXT, 1)[:300]
    times = []
    for context in contexts.split(1):
        begin = time.perf_counter()
        model(context)
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2] * 1e6


def main(steps: int, width: int, picture: Path) -> None:
    """Trains a dense and a gated model alike, and compares them."""
    torch.manual_seed(0)
    frequent = load_corpus("python-docs").vocabulary.words[:WORDS]
    corpus = load_corpus("python-docs", vocabulary=Vocabulary(frequent))  # all other words are <unk>
    seen, unseen = corpus.parts["train"], corpus.parts["test"]
    dense = make_model(width)
    train(dense, seen, steps)

    model = make_model(width)
    print(bg.sparsify_(model, sparsity=0.0, block_size=(64, 16)))
    ramp = bg.SparsityRamp(model, final=0.9, begin=steps // 4, end=steps // 2)
    train(model, seen, steps, ramp)
    print(bg.summary(model, unseen[:CONTEXT].unsqueeze(0)))
    with bg.record_gates(model) as record, torch.no_grad():
        model(unseen.unfold(0, CONTEXT, 1))
    bg.inspect.draw_distribution(record, picture)
    fast = bg.pack(model, torch.int8)

    print(f"perplexity: dense {perplexity(dense.eval(), unseen):.1f}, ", end="")
    print(f"gated {perplexity(model.eval(), unseen):.1f}, gated and packed to int8 {perplexity(fast, unseen):.1f}")
    before, after = microseconds(dense, unseen), microseconds(fast, unseen)
    print(f"one word: dense {before:.0f} us, gated and packed {after:.0f} us: {before / after:.1f}x faster")
    print(f"picture of the gates: {picture}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--picture", type=Path, default=Path("gates.png"))
    main(**vars(parser.parse_args()))
