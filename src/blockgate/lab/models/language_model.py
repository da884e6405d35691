"""A word language model: embedding, a stack of LSTM or Quasi-RNN layers, and an output layer over the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from blockgate.errors import invalid
from blockgate.grid import check_size
from blockgate.lab.models.matrices import GateConfig, matrices, start_gates
from blockgate.lab.models.softmax import AdaptiveSoftmax, FullSoftmax
from blockgate.layers.dropout import DropoutEmbedding, LockedDropout, check_share, weight_drop_

__all__ = ["Carried", "LanguageModel", "LanguageModelConfig", "Losses", "detach"]

# For each layer the state that its last call returned.
Carried = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageModelConfig:
    """Sizes of the model, the kind of its matrices, and its dropouts."""

    cell: Literal["lstm", "qrnn"] = "lstm"
    """Recurrent layers."""
    matrices: str = "dense"
    """Kind of the recurrent layers' matrices: dense, dynamic or static."""
    embedding_size: int = 256
    """Features of a word."""
    hidden_size: int = 256
    """Features of a recurrent layer."""
    num_layers: int = 2
    """Recurrent layers."""
    windows: tuple[int, ...] = (2, 1)
    """Inputs a Quasi-RNN layer sees, 1 or 2, from the first layer on; the last number counts for all that follow."""
    projection: bool = False
    """A linear layer to the embedding's size before the output. Without it, and tied, the last layer has that size."""
    tied: bool = True
    """Use the embedding as the output layer's weight."""
    cutoffs: tuple[int, ...] = ()
    """Where groups of rarer words begin (adaptive softmax); none for the full softmax."""
    word_dropout: float = 0.0
    """Share of words dropped from the vocabulary."""
    dropout: float = 0.0
    """Share dropped between layers, and of the embedding and the output where they have no share of their own."""
    input_dropout: float | None = None
    """Share of the embedding's features."""
    output_dropout: float | None = None
    """Share of the last layer's features."""
    weight_dropout: float = 0.0
    """Share of weights: of an LSTM's recurrent matrices, of a Quasi-RNN's filters."""
    zoneout: float = 0.0
    """Share of a Quasi-RNN's states that a step leaves alone."""
    locked: bool = True
    """Drop the same features at all steps of a segment."""
    gate: GateConfig = field(default_factory=GateConfig)
    """Options of dynamic and static matrices."""


class Losses(NamedTuple):
    """What `LanguageModel.loss` returns: (T, N) per word, the state to carry on, and the last layer's output.

    The output (T, N, features) is given before and after its dropout, for activation regularisation. `against_teacher`
    (T, N) is the cross entropy against the predictions of another model, None where there is none.
    """

    per_word: Tensor
    carried: Carried
    output: Tensor
    dropped_output: Tensor
    against_teacher: Tensor | None


class LanguageModel(nn.Module):
    """Predicts the next word at every step.

    Args:
        config: sizes and kinds.
        words: size of the vocabulary.
    """

    def __init__(self, config: LanguageModelConfig, words: int) -> None:
        super().__init__()
        for name in ("embedding_size", "hidden_size", "num_layers"):
            check_size(name, getattr(config, name))
        self.config = config
        self.words = check_size("words", words)
        size = config.embedding_size
        self.embedding = DropoutEmbedding(words, size, p=config.word_dropout)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.layers = nn.ModuleList(_recurrent_layers(config))
        features = _layer_sizes(config)[-1][1]
        self.projection = nn.Linear(features, size) if config.projection else None
        shares = [config.dropout if own is None else own for own in (config.input_dropout, config.output_dropout)]
        make = LockedDropout if config.locked else nn.Dropout
        self.input_dropout, self.dropout, self.output_dropout = (
            make(check_share("dropout", p)) for p in (shares[0], config.dropout, shares[1])
        )
        tied = self.embedding.weight if config.tied else None
        out = size if config.projection else features
        if config.cutoffs:
            self.softmax: AdaptiveSoftmax | FullSoftmax = AdaptiveSoftmax(out, words, config.cutoffs, tied)
        else:
            self.softmax = FullSoftmax(out, words, tied)
        start_gates(self, config.gate)

    @property
    def matrix_layers(self) -> tuple[str, ...]:
        """Names of the layers whose kind the config decides."""
        return tuple(f"layers.{number}" for number in range(len(self.layers)))

    def forward(self, words: Tensor, carried: Carried | None = None) -> tuple[Tensor, Carried]:
        """Log-probabilities (T, N, vocabulary) of each next word for words (T, N), and the state to carry on."""
        features, carried, _ = self._features(words, carried)
        return self.softmax(features.flatten(0, -2)).view(*words.shape, self.words), carried

    def loss(
        self, words: Tensor, targets: Tensor, carried: Carried | None = None, teacher: Tensor | None = None
    ) -> Losses:
        """Negative log-probabilities of targets (T, N) after words (T, N); a target below 0 counts as 0 loss.

        `teacher` are log-probabilities (T, N, vocabulary) of another model to compare with.
        """
        features, carried, output = self._features(words, carried)
        rows = features.flatten(0, -2)
        per_word = self.softmax.loss(rows, targets.flatten().clamp(min=0)).view_as(targets)
        against_teacher = None
        if teacher is not None:
            against_teacher = -(teacher.exp() * self.softmax(rows).view_as(teacher)).sum(-1)
        return Losses(per_word.masked_fill(targets < 0, 0.0), carried, *output, against_teacher)

    def _features(self, words: Tensor, carried: Carried | None) -> tuple[Tensor, Carried, tuple[Tensor, Tensor]]:
        """What the softmax sees, the new state, and the last layer's output before and after its dropout."""
        if words.dim() != 2 or words.is_floating_point():
            raise invalid(
                "words", expected="numbers of shape (time, batch)", got=tuple(words.shape), remedy="Use words[:, None]."
            )
        x = _drop(self.input_dropout, self.embedding(words))
        states = []
        for number, layer in enumerate(self.layers):
            if number:
                x = _drop(self.dropout, x)
            x, state = layer(x, None if carried is None else carried[number])
            states.append(state)
        dropped = _drop(self.output_dropout, x)
        features = dropped if self.projection is None else self.projection(dropped)
        return features, tuple(states), (x, dropped)


def _drop(dropout: nn.Module, x: Tensor) -> Tensor:
    # One token at a time, a call that does nothing costs as much as a small layer.
    return dropout(x) if dropout.training else x


def detach(carried: Any) -> Any:
    """A carried state without the graph it came from."""
    if isinstance(carried, tuple):
        return tuple(detach(part) for part in carried)
    return carried.detach() if isinstance(carried, torch.Tensor) else carried


def _layer_sizes(config: LanguageModelConfig) -> list[tuple[int, int]]:
    """Input and output features of each recurrent layer."""
    last = config.embedding_size if config.tied and not config.projection else config.hidden_size
    outputs = [*[config.hidden_size] * (config.num_layers - 1), last]
    return list(zip([config.embedding_size, *outputs[:-1]], outputs, strict=True))


def _recurrent_layers(config: LanguageModelConfig) -> list[nn.Module]:
    """One layer each, so that any dropout can stand between them."""
    kind = matrices(config.matrices)
    options = kind.options(config.gate)
    layers = []
    for number, (inputs, outputs) in enumerate(_layer_sizes(config)):
        if config.cell == "lstm":
            layer = kind.lstm(inputs, outputs, **options)
            owner, name = layer, "weight_hh_l0"
        else:
            window = config.windows[min(number, len(config.windows) - 1)]
            layer = kind.qrnn(inputs, outputs, window=window, zoneout=config.zoneout, **options)
            owner, name = layer.get_submodule("filters.0"), "weight"
        if config.weight_dropout:
            weight_drop_(owner, name, config.weight_dropout)
        layers.append(layer)
    return layers
