"""What packing costs a trained language model, in perplexity."""

from __future__ import annotations

import re
from collections import Counter
from pydoc_data.topics import topics

import pytest
import torch
from torch import nn

import blockgate as bg

VOCABULARY = 800
STEPS, BATCH = 20, 32


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.lstm = bg.DynamicSparseLSTM(64, 128, 2, block_size=32, sparsity=0.5, select="global")
        self.decoder = nn.Linear(128, VOCABULARY)

    def loss(self, words, state=None):
        """Mean negative log-likelihood of words (T + 1, N), each after those before it."""
        y, state = self.lstm(self.embedding(words[:-1]), state)
        return nn.functional.cross_entropy(self.decoder(y).flatten(0, 1), words[1:].flatten()), state


def real_english():
    """Words of Python's own documentation as indices (time, batch); rare words are one."""
    words = re.findall(r"[a-z']+|[.,]", " ".join(topics.values()).lower())
    index = {word: n for n, (word, _) in enumerate(Counter(words).most_common(VOCABULARY - 1), start=1)}
    ids = torch.tensor([index.get(word, 0) for word in words])
    return ids[: len(ids) // BATCH * BATCH].view(BATCH, -1).T.contiguous()


@torch.no_grad()
def perplexity(model, text):
    losses, state = [], None
    for begin in range(0, len(text) - 1 - STEPS, STEPS):
        loss, state = model.loss(text[begin : begin + STEPS + 1], state)
        losses.append(loss)
    return torch.stack(losses).mean().exp().item()


@pytest.fixture(scope="module")
def trained():
    return train_model()


def train_model():
    torch.manual_seed(0)
    text = real_english()
    split = int(0.9 * len(text))
    model, optimizer = (made := LanguageModel()), torch.optim.Adam(made.parameters(), lr=5e-3)
    state = None
    for begin in range(0, split - 1 - STEPS, STEPS):
        loss, state = model.loss(text[begin : begin + STEPS + 1], state)
        state = tuple(s.detach() for s in state)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval(), text[split:]


@pytest.mark.parametrize(
    ("dtype", "most"),
    [("float32", 1e-3), ("bfloat16", 0.05), ("float16", 0.02), ("int8", 0.3), ("int8a8", 0.6), ("int4", 1.0)],
)
def test_packing_costs_little_perplexity(trained, dtype, most):
    model, text = trained
    dense = perplexity(model, text)
    assert dense < 130, "it has learnt: a guess by the frequency of words has 168"
    assert abs(perplexity(bg.pack(model, dtype), text) - dense) < most


@pytest.mark.parametrize(
    ("dtype", "share"),
    [("float32", 1.01), ("bfloat16", 0.51), ("float16", 0.51), ("int8", 0.27), ("int8a8", 0.27), ("int4", 0.165)],
)
def test_memory_drops_accordingly(dtype, share):
    layer = bg.DynamicSparseLinear(1024, 1024, block_size=128, key_size=64)
    packed = bg.pack(layer, dtype)

    def size(tensors):
        return sum(t.numel() * t.element_size() for t in tensors)

    gate = size(layer.gate.parameters())
    held = size(packed.parameters()) + size(packed.buffers()) - gate
    assert held <= share * (size(layer.parameters()) - gate) + 1024 * 4
