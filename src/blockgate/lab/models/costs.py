"""What a model costs, gates and output layer included, and the small dense model that costs as much."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from blockgate.find import gate_label
from blockgate.gates import Gate
from blockgate.lab.models.language_model import LanguageModel, LanguageModelConfig
from blockgate.lab.models.softmax import AdaptiveSoftmax

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Costs", "count_costs", "small_dense"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Multiply-adds of one token or image, and parameters, each counted once.

    A word's embedding is looked up, and costs none. The output layer is counted with all its words: that is what it
    takes to know the probability of every next word.

    Attributes:
        macs: of open blocks, weights that aren't zero, and gates.
        macs_dense: with all blocks open, nothing pruned and no gates.
        gate_macs: those of the gates.
        matrix_macs: those of the layers whose kind the config decides, gates included.
        matrix_macs_dense: the same, dense and without gates.
        parameters: all.
        gate_parameters: those of the gates.
        zeros: parameters that are pruned, or in blocks that are closed for good.
    """

    macs: float
    macs_dense: int
    gate_macs: int
    matrix_macs: float
    matrix_macs_dense: int
    parameters: int
    gate_parameters: int
    zeros: int


def count_costs(model: nn.Module, densities: Mapping[str, float] | None = None) -> Costs:
    """Counts a model of this room.

    Args:
        model: a LanguageModel or an ImageNetwork.
        densities: measured, by the names that `record_gates` gives; target densities where none is given.
    """
    layers = tuple(f"{name}." for name in model.matrix_layers)  # type: ignore[union-attr]
    total = matrices = 0.0
    dense = matrices_dense = gate_macs = zeros = 0
    for name, size, spent, of_gate in _products(model, densities or {}):
        total, dense, gate_macs = total + spent + of_gate, dense + size, gate_macs + of_gate
        if name.startswith(layers):
            matrices, matrices_dense = matrices + spent + of_gate, matrices_dense + size
    gates = [p for module in model.modules() if isinstance(module, Gate) for p in module.parameters()]
    for weight in _plain_weights(model):
        zeros += weight.numel() - _nonzero(weight)
    return Costs(
        macs=total,
        macs_dense=dense,
        gate_macs=gate_macs,
        matrix_macs=matrices,
        matrix_macs_dense=matrices_dense,
        parameters=sum(p.numel() for p in model.parameters()),
        gate_parameters=sum(p.numel() for p in gates),
        zeros=zeros,
    )


def small_dense(config: LanguageModelConfig, words: int, macs: float) -> LanguageModelConfig:
    """The dense model of least width that has at least `macs` multiply-adds a token, so that it is never worse off.

    All but the width stays as in `config`; the embedding becomes smaller too where it is as wide as the layers.
    """
    low, high = 1, 1
    while _dense_macs(config, words, high) < macs:
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        if _dense_macs(config, words, middle) < macs:
            low = middle + 1
        else:
            high = middle
    return _dense(config, high)


def _dense(config: LanguageModelConfig, width: int) -> LanguageModelConfig:
    embedding = width if config.embedding_size == config.hidden_size else config.embedding_size
    return replace(config, matrices="dense", hidden_size=width, embedding_size=embedding)


def _dense_macs(config: LanguageModelConfig, words: int, width: int) -> float:
    with torch.device("meta"):
        return count_costs(LanguageModel(_dense(config, width), words)).macs


def _products(model: nn.Module, densities: Mapping[str, float]) -> Iterator[tuple[str, int, float, int]]:
    """Each product with a weight: its name, multiply-adds of the whole weight, of what is open, of its gate."""
    for name, module in model.named_modules():
        if isinstance(module, Gate):
            size = module.grid.out_features * module.grid.in_features
            gate = sum(w.numel() for w in (module.weight, module.hidden_weight) if w is not None)
            yield name, size, size * densities.get(gate_label(name), module.target_density), gate
        elif isinstance(module, AdaptiveSoftmax):
            # Its decoder is counted as any linear layer.
            size = module.group_weight.numel()
            yield name, size, size, 0
        elif isinstance(module, (nn.Linear, nn.LSTM)):
            for weight in _matrices(module):
                yield f"{name}.", weight.numel(), _nonzero(weight), 0


def _plain_weights(model: nn.Module) -> list[Tensor]:
    """The matrices of layers without gates, each once."""
    found = {w: None for m in model.modules() if isinstance(m, (nn.Linear, nn.LSTM)) for w in _matrices(m)}
    return list(found)


def _matrices(layer: nn.Module) -> list[Tensor]:
    return [weight for weight in layer.parameters(recurse=False) if weight.dim() == 2]


def _nonzero(weight: Tensor) -> int:
    return weight.numel() if weight.is_meta else int(torch.count_nonzero(weight))
