"""What the gates of the demo's models decide: over the test text, and word by word along one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockgate.inspect import GateRecord, record_gates
from blockgate.lab.data import Corpus
from blockgate.lab.data.corpus import END_OF_SENTENCE, UNKNOWN
from blockgate.lab.models.layouts import layer_name
from blockgate.lab.training import Trained

__all__ = ["Trace", "distribution", "layer_title", "trace_sentence"]

# The first test sentence of so many words, all of them known, is the one that is drawn.
SENTENCE_WORDS = range(10, 18)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Gates along a sentence: for each layer (words, blocks), 0 where closed."""

    label: str
    words: list[str]
    gates: dict[str, Tensor]


def layer_title(name: str) -> str:
    """What reports call the gate `layers.0.ih_l1` of a stack of LSTM layers: layer 2, input."""
    part, _, number = layer_name(name, stacked=True).removeprefix("layers.0.").partition("_l")
    return f"layer {int(number) + 1}, {'input' if part == 'ih' else 'recurrent'}"


@torch.no_grad()
def trace_sentence(label: str, trained: Trained, corpus: Corpus) -> Trace:
    """The gates of every word of a test sentence, read from its beginning."""
    words = _choose_sentence(corpus)
    with record_gates(trained.model, coactivation=False, trace=len(words)) as record:
        trained.model(corpus.vocabulary.encode(words)[:, None])
    gates = {layer_title(name): gate.trace for name, gate in record.gates.items()}
    return Trace(label=label, words=words, gates=gates)


def _choose_sentence(corpus: Corpus) -> list[str]:
    sentences: list[list[str]] = [[]]
    for number in corpus.parts["test"].tolist():
        word = corpus.vocabulary.words[number]
        if word == END_OF_SENTENCE:
            sentences.append([])
        else:
            sentences[-1].append(word)
    good = (one for one in sentences if len(one) in SENTENCE_WORDS and UNKNOWN not in one)
    return next(good, sentences[0])


def distribution(record: GateRecord) -> dict[str, Any]:
    """Shares of blocks always on, input dependent and always off, by layer."""
    return {layer_title(name): shares._asdict() for name, shares in record.distribution().items()}
