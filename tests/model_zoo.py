"""Small models of many makes, for tests of what works on any model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import blockgate as bg

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, WORDS = 32, 40


class TiedLM(nn.Module):
    """A decoder tied to the embedding, and one block used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.again = self.block
        self.decoder = nn.Linear(WIDTH, WORDS)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens):
        h = self.embedding(tokens)
        return self.decoder(h + self.again(self.block(h)))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.tags = nn.Linear(WIDTH, 5)

    def forward(self, tokens):
        return self.tags(torch.relu(self.middle(self.rnn(self.embedding(tokens))[0])))


class BothWaysTagger(Tagger):
    """Reads a sentence from both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)


class Speech(nn.Module):
    """A GRU over frames, as streaming models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = bg.layers.QRNN(WIDTH, WIDTH, 2, window=(2, 1))
        self.tags = nn.Linear(WIDTH, 5)

    def forward(self, x):
        return self.tags(self.rnn(x)[0])


def cnn() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
    return nn.Sequential(body, nn.Linear(4 * 6 * 6, 64), nn.ReLU(), nn.Linear(64, 10))


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, **options)
    shortcuts = options.get("batch_first", False) and not options.get("norm_first", False)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=shortcuts)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=WIDTH, n_layer=2, n_head=4, **ends))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    return BertForMaskedLM(BertConfig(vocab_size=WORDS, max_position_embeddings=16, **sizes))


def tokens() -> torch.Tensor:
    return torch.randint(WORDS, (3, 6))


def sequence() -> torch.Tensor:
    return torch.randn(3, 6, WIDTH)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    example: Callable[[], Any]
    gated: int
    """How many layers are gated by default."""


CASES = {
    "transformer": Case(
        lambda: nn.Transformer(WIDTH, 4, 1, 1, 64, 0.0, batch_first=True), lambda: (sequence(), sequence()), 4
    ),
    "encoder": Case(lambda: encoder(batch_first=True), sequence, 4),
    "encoder, time first": Case(encoder, sequence, 4),
    "encoder, norm first": Case(lambda: encoder(batch_first=True, norm_first=True), sequence, 4),
    "gpt2": Case(gpt2, lambda: {"input_ids": tokens()}, 8),
    "bert": Case(bert, lambda: {"input_ids": tokens()}, 7),
    "tagger": Case(Tagger, tokens, 2),
    "tagger, both ways": Case(BothWaysTagger, tokens, 2),
    "speech": Case(Speech, sequence, 1),
    "quasi-recurrent": Case(Recurrent, sequence, 1),
    "cnn": Case(cnn, lambda: torch.randn(3, 1, 8, 8), 1),
    "tied and shared": Case(TiedLM, tokens, 2),
}
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def run(model: nn.Module, example: Any) -> torch.Tensor:
    if isinstance(example, dict):
        return model(**example)[0]
    return model(*example) if isinstance(example, tuple) else model(example)
