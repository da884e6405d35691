"""What a model costs, gates and output layer included, and the small dense model that costs as much."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from blockgate.inspect.counting import count_layers, matrices_of
from blockgate.lab.models.language_model import LanguageModel, LanguageModelConfig
from blockgate.lab.models.softmax import AdaptiveSoftmax

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    lines, _ = count_layers(model, densities=densities)
    modules = dict(model.named_modules())
    zeros = [0 if line.blocks else _zeros(modules.get(line.name)) for line in lines]
    costs = [(f"{line.name}.", line.macs_dense, line.macs_now - z) for line, z in zip(lines, zeros, strict=True)]
    # A bare parameter beside the decoder, which `count_layers` knows as a linear layer.
    groups = [m.group_weight.numel() for m in model.modules() if isinstance(m, AdaptiveSoftmax)]
    layers = tuple(f"{name}." for name in model.matrix_layers)  # type: ignore[union-attr]
    matrices = [(dense, now) for name, dense, now in costs if name.startswith(layers)]
    return Costs(
        macs=sum(now for _, _, now in costs) + sum(groups),
        macs_dense=sum(dense for _, dense, _ in costs) + sum(groups),
        gate_macs=sum(line.gate_macs for line in lines),
        matrix_macs=sum(now for _, now in matrices),
        matrix_macs_dense=sum(dense for dense, _ in matrices),
        parameters=sum(line.parameters + line.gate_parameters for line in lines),
        gate_parameters=sum(line.gate_parameters for line in lines),
        zeros=sum(zeros),
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


def _zeros(layer: nn.Module | None) -> int:
    """Weights of a plain layer that are 0; none where there are no numbers, or no layer but other parameters."""
    weights = [] if layer is None else [w for w in matrices_of(layer) if not w.is_meta]
    return sum(weight.numel() - int(torch.count_nonzero(weight)) for weight in weights)
