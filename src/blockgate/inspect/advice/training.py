"""What training the advised layers costs: a step forward and backward, gated against torch, at the ends of a ramp."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from blockgate.inspect.advice.conclusions import Advice, LayerAdvice
from blockgate.inspect.advice.measure import TORCH, Times, Way
from blockgate.inspect.advice.store import Store
from blockgate.inspect.timing import interleave
from blockgate.layers import QRNN

__all__ = ["BATCH", "measure_training", "training_shape", "with_training"]

# The example is what answers have to be fast for; steps of training have more rows. Recurrent layers get sequences.
BATCH = 256
SEQUENCES, STEPS = 16, 16

# Seconds for one way, about. A step takes longer than a call for one row, but these are few.
SECONDS = 0.1


def training_shape(layer: nn.Module, features: int) -> tuple[int, ...]:
    """The shape of the input of a step: 256 rows, for recurrent layers as 16 sequences of 16."""
    if not isinstance(layer, (nn.RNNBase, QRNN)):
        return (BATCH, features)
    return (SEQUENCES, STEPS, features) if getattr(layer, "batch_first", False) else (STEPS, SEQUENCES, features)


def with_training(advice: Advice, layers: Iterable[tuple[str, nn.Module, str, int]], known: Store) -> Advice:
    """The advice with the time of a step of training for each layer that it gates.

    Args:
        advice: by the times of inference.
        layers: name, module, key in the store and input features of each layer that was called.
        known: where times are kept.
    """
    found = {name: (module, key, features) for name, module, key, features in layers}
    made = tuple(
        replace(layer, training=_of_layer(layer, advice.sparsity, *found[layer.name], known)) if layer.gate else layer
        for layer in advice.layers
    )
    return replace(advice, layers=made)


def _of_layer(
    layer: LayerAdvice, sparsity: float, module: nn.Module, key: str, features: int, known: Store
) -> dict[str, float]:
    """Seconds of a step: "torch", and by the sparsity of the gated layer."""
    assert layer.block_size is not None
    gated = Way(sparsity=0.0, block_size=layer.block_size, key_size=layer.key_size)
    ways = {"torch": TORCH, "0": gated, f"{sparsity:g}": replace(gated, sparsity=sparsity)}
    shape = training_shape(module, features)
    key = f"{key}, training with {' x '.join(map(str, shape))}"
    missing = [way for way in ways.values() if way not in known.get(key, ways.values())]
    if missing:
        known.put(key, measure_training(module, shape, missing))
    times = known.get(key, ways.values())
    return {name: times[way].warm for name, way in ways.items()}


def measure_training(layer: nn.Module, shape: tuple[int, ...], ways: Iterable[Way]) -> dict[Way, Times]:
    """Times of a step, forward and backward with gradients of the input and all parameters, all ways in turn."""
    x = torch.randn(shape)
    calls = {str(way): _step(way.build(copy.deepcopy(layer)).train(), x) for way in ways}
    with torch.enable_grad():
        times = interleave(calls, seconds=SECONDS)
    return {way: Times(times[str(way)].median, times[str(way)].median) for way in ways}


def _step(layer: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    leaf = x.clone().requires_grad_()
    leaves = [leaf, *(p.requires_grad_() for p in layer.parameters())]

    def step() -> None:
        for tensor in leaves:
            tensor.grad = None
        y = layer(leaf)
        (y[0] if isinstance(y, tuple) else y).sum().backward()

    return step
