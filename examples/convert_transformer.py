"""Gate a trained transformer: train a small one, convert it, close blocks while fine-tuning, pack it, time it.

    python examples/convert_transformer.py

It predicts the next word of Python's documentation. The dense model is trained on for as long as the gated one, so that
the comparison is fair. torch's attention reads its own weights, so only the feed-forward layers are gated.
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
from torch import Tensor, nn

import blockgate as bg
from blockgate.lab.data import Vocabulary, load_corpus

WORDS, CONTEXT = 1000, 32


class Transformer(nn.Module):
    """Words (batch, time) in, scores of the next word (batch, time, WORDS) out."""

    def __init__(self, size: int, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, size)
        self.places = nn.Embedding(CONTEXT, size)
        layer = nn.TransformerEncoderLayer(size, 4, 4 * size, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(size, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Each place sees the words up to its own."""
        steps = words.shape[1]
        x = self.words(words) + self.places(torch.arange(steps))
        later = nn.Transformer.generate_square_subsequent_mask(steps)
        return self.head(self.encoder(x, mask=later, is_causal=True))


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross entropy of windows (batch, CONTEXT + 1)."""
    return nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def train(model: nn.Module, text: Tensor, steps: int, lr: float, ramp: bg.SparsityRamp | None = None) -> None:
    """Adam on random windows; a ramp, if there is one, moves with every step."""
    # Made here, after the conversion: the optimizer must know the gates.
    optimizer = torch.optim.Adam(model.parameters(), lr)
    windows = text.unfold(0, CONTEXT + 1, 1)
    model.train()
    for _ in range(steps):
        loss = loss_of(model, windows[torch.randint(len(windows), (32,))])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if ramp is not None:
            ramp.step()
    model.eval()


@torch.inference_mode()
def perplexity(model: nn.Module, text: Tensor) -> float:
    """On text that the model has not seen."""
    return float(loss_of(model, text.unfold(0, CONTEXT + 1, CONTEXT)).exp())


@torch.inference_mode()
def milliseconds(models: dict[str, nn.Module], text: Tensor) -> dict[str, float]:
    """Median time of each model for one window, in turns."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for window in text.unfold(0, CONTEXT, CONTEXT)[:100].split(1):
        for name, model in models.items():
            begin = time.perf_counter()
            model(window)
            times[name].append(time.perf_counter() - begin)
    return {name: sorted(values)[len(values) // 2] * 1e3 for name, values in times.items()}


def main(steps: int, size: int, sparsity: float) -> None:
    """Trains, converts, fine-tunes, compares."""
    torch.manual_seed(0)
    frequent = load_corpus("python-docs").vocabulary.words[:WORDS]
    corpus = load_corpus("python-docs", vocabulary=Vocabulary(frequent))  # all other words are <unk>
    seen, unseen = corpus.parts["train"], corpus.parts["test"]
    trained = Transformer(size)
    train(trained, seen, steps, 1e-3)
    dense, gated = trained, copy.deepcopy(trained)

    example = unseen[:CONTEXT].unsqueeze(0)
    print(bg.sparsify_(gated, sparsity=0.0, block_size=(64, 16), example_input=example))
    print(f"perplexity: trained {perplexity(trained, unseen):.1f}, converted {perplexity(gated, unseen):.1f}")
    ramp = bg.SparsityRamp(gated, final=sparsity, begin=0, end=steps // 2)
    train(gated, seen, steps, 5e-4, ramp)
    train(dense, seen, steps, 5e-4)
    packed = {"dense, packed": bg.pack(dense, torch.int8), "gated, packed": bg.pack(gated, torch.int8)}
    print(f"perplexity after as much training again: dense {perplexity(dense, unseen):.1f}, ", end="")
    print(f"{sparsity:.0%} gated {perplexity(gated, unseen):.1f}, ", end="")
    print(f"gated and packed to int8 {perplexity(packed['gated, packed'], unseen):.1f}")

    saved = bg.summary(gated, example)
    print(f"multiply-adds of linear layers: {saved.macs_now / saved.macs_dense:.0%} of dense, head and gates included")
    times = milliseconds({"dense, torch": dense, **packed}, unseen)
    for name, time_taken in times.items():
        print(f"{name}: {time_taken:.2f} ms for {CONTEXT} words, {times['dense, torch'] / time_taken:.2f}x")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of training, and of fine-tuning again")
    parser.add_argument("--size", type=int, default=256, help="features of a word; a multiple of 4")
    parser.add_argument("--sparsity", type=float, default=0.75)
    main(**vars(parser.parse_args()))
