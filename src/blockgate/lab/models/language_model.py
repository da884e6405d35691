"""A word language model: embedding, a stack of LSTM or Quasi-RNN layers, and an output layer over the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from blockgate.errors import invalid
from blockgate.grid import check_size
from blockgate.lab.models.layouts import layer_name, stack_states
from blockgate.lab.models.matrices import matrices
from blockgate.lab.models.softmax import AdaptiveSoftmax, FullSoftmax
from blockgate.layers.dropout import DropoutEmbedding, LockedDropout, check_share, weight_drop_
from blockgate.spec import GateSpec

__all__ = ["Carried", "LanguageModel", "LanguageModelConfig", "Losses", "detach"]

Value = TypeVar("Value")

# For each module of `LanguageModel.layers` the state that its last call returned.
Carried = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageModelConfig:
    """Sizes of the model, the kind of its matrices, and its dropouts."""

    cell: Literal["lstm", "qrnn"] = "lstm"
    """Recurrent layers."""
    matrices: str = "dense"
    """Kind of the recurrent layers' matrices: dense, dynamic, static or random."""
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
    gate: GateSpec = field(default_factory=GateSpec)
    """Options of dynamic and static matrices. If a ramp is set, sparsity rises to the one given here."""


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

    `layers` holds all recurrent layers as one stack, which takes a token through them in one native call. It holds one
    layer each where no stack can do the same: an LSTM whose last layer has another size, or locked dropout between
    layers. Checkpoints of either layout load into the other.

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
        features = _output_size(config)
        self.projection = nn.Linear(features, size) if config.projection else None
        shares = [config.dropout if own is None else own for own in (config.input_dropout, config.output_dropout)]
        make = LockedDropout if config.locked else nn.Dropout
        self.input_dropout, self.dropout, self.output_dropout = (
            make(check_share("dropout", p)) for p in (shares[0], config.dropout, shares[1])
        )
        tied = self.embedding.weight if config.tied else None
        out = size if config.projection else features
        # A small vocabulary has fewer groups of rare words than the config, or none.
        cutoffs = [cutoff for cutoff in config.cutoffs if cutoff < words]
        if cutoffs:
            self.softmax: AdaptiveSoftmax | FullSoftmax = AdaptiveSoftmax(out, words, cutoffs, tied)
        else:
            self.softmax = FullSoftmax(out, words, tied)

    @property
    def matrix_layers(self) -> tuple[str, ...]:
        """Names of the layers whose kind the config decides."""
        return tuple(f"layers.{number}" for number in range(len(self.layers)))

    @property
    def is_one_stack(self) -> bool:
        """Whether one module holds all recurrent layers."""
        return len(self.layers) == 1

    def own_names(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """Values by the names of parameters, in either layout, by the names that those have in this model."""
        return {layer_name(name, stacked=self.is_one_stack): value for name, value in values.items()}

    def own_states(self, carried: Carried | None) -> Carried | None:
        """A carried state of this model, also where a former version saved it layer by layer."""
        return stack_states(carried) if carried is not None and len(carried) > len(self.layers) else carried

    def forward(self, words: Tensor, carried: Carried | None = None) -> tuple[Tensor, Carried]:
        """Log-probabilities (T, N, vocabulary) of each next word for words (T, N), and the state to carry on."""
        features, carried, _ = self._features(words, carried)
        return self.softmax(features.flatten(0, -2)).view(*words.shape, self.words), carried

    def likeliest(self, words: Tensor, carried: Carried | None = None, *, k: int = 1) -> tuple[Tensor, Tensor, Carried]:
        """The k likeliest words after the last of words (T, N), in order of falling probability.

        Returns:
            Scores (N, k), which are log-probabilities but for a number that each row's words share; numbers of the
            words (N, k); the state to carry on.
        """
        features, carried, _ = self._features(words, carried)
        scores, numbers = self.softmax.likeliest(features[-1], k)
        return scores, numbers, carried

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
        x, carried = self.run_layers(_drop(self.input_dropout, self.embedding(words)), carried)
        dropped = _drop(self.output_dropout, x)
        features = dropped if self.projection is None else self.projection(dropped)
        return features, carried, (x, dropped)

    def run_layers(self, x: Tensor, carried: Carried | None = None) -> tuple[Tensor, Carried]:
        """Output (T, N, features) of the last recurrent layer for x (T, N, embedding), and the state to carry on."""
        states = []
        for number, layer in enumerate(self.layers):
            if number:
                x = _drop(self.dropout, x)
            x, state = layer(x, None if carried is None else carried[number])
            states.append(state)
        return x, tuple(states)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for key in [key for key in state_dict if key.startswith(prefix)]:
            own = prefix + layer_name(key.removeprefix(prefix), stacked=self.is_one_stack)
            if own != key:
                state_dict[own] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _drop(dropout: nn.Module, x: Tensor) -> Tensor:
    # One token at a time, a call that does nothing costs as much as a small layer.
    return dropout(x) if dropout.training else x


def detach(carried: Any) -> Any:
    """A carried state without the graph it came from."""
    if isinstance(carried, tuple):
        return tuple(detach(part) for part in carried)
    return carried.detach() if isinstance(carried, torch.Tensor) else carried


def _output_size(config: LanguageModelConfig) -> int:
    """Features of the last recurrent layer."""
    return config.embedding_size if config.tied and not config.projection else config.hidden_size


def _fits_one_stack(config: LanguageModelConfig) -> bool:
    """Whether one module can hold all recurrent layers."""
    if config.locked and config.dropout:
        # Stacks have nn.LSTM's dropout between layers, which draws again at every step.
        return False
    return config.cell == "qrnn" or _output_size(config) == config.hidden_size


def _recurrent_layers(config: LanguageModelConfig) -> list[nn.Module]:
    """One stack of all layers where there can be one, otherwise one layer each."""
    kind, total = matrices(config.matrices), config.num_layers
    options = kind.options(config.gate)
    outputs = [*[config.hidden_size] * (total - 1), _output_size(config)]
    inputs = [config.embedding_size, *outputs[:-1]]
    windows = [config.windows[min(number, len(config.windows) - 1)] for number in range(total)]
    count = total if _fits_one_stack(config) else 1
    # torch warns of a dropout that has no layers to stand between.
    options["dropout"] = config.dropout if count > 1 else 0.0
    layers: list[nn.Module] = []
    for first in range(0, total, count):
        if config.cell == "lstm":
            layer = kind.lstm(inputs[first], outputs[first], count, **options)
            dropped = [(layer, [f"weight_hh_l{number}" for number in range(count)])]
        else:
            last = first + count - 1
            sizes = {"window": windows[first : last + 1], "output_size": outputs[last]}
            layer = kind.qrnn(inputs[first], outputs[first], count, zoneout=config.zoneout, **sizes, **options)
            dropped = [(layer.get_submodule(f"filters.{number}"), ["weight"]) for number in range(count)]
        for owner, names in dropped if config.weight_dropout else ():
            weight_drop_(owner, names, config.weight_dropout)
        layers.append(layer)
    return layers
