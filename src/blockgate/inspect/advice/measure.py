"""Times of one layer for inputs of one shape: dense and gated, in every format, with warm and with cold weights."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from blockgate.convert import pack
from blockgate.convert.forms import gated_forms, packers
from blockgate.inspect.timing import copies_past_cache, in_turn, interleave
from blockgate.spec import GateSpec

__all__ = ["BLOCKS", "KEYS", "SPARSITIES", "TORCH", "Times", "Way", "first_ways", "measure", "more_ways"]

SPARSITIES = (0.5, 0.75, 0.9)
BLOCKS = ((256, 16), (128, 128))
KEYS = (64, 128)


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to run a layer.

    Attributes:
        format: the format that weights are packed to, or "" for the layer of torch as it is.
        sparsity: None for a dense layer.
        block_size: (out, in), of a gated layer.
        key_size: of a gated layer.
    """

    format: str = ""
    sparsity: float | None = None
    block_size: tuple[int, int] | None = None
    key_size: int | None = None

    @property
    def gate(self) -> str:
        """Blocks and key in words; "" for a dense layer."""
        return "blocks of {} x {}, key {}".format(*self.block_size, self.key_size) if self.block_size else ""

    def __str__(self) -> str:
        name = f"packed {self.format}" if self.format else "torch"
        return name if self.sparsity is None else f"{name}, {self.sparsity:.0%}, {self.gate}"

    def build(self, layer: nn.Module) -> nn.Module:
        """The layer in this form, with fresh gates, for inference."""
        if self.sparsity is not None:
            spec = GateSpec(block_size=self.block_size, key_size=self.key_size, sparsity=self.sparsity)  # type: ignore[arg-type]
            layer = gated_forms()[type(layer)].from_dense(layer, spec=spec)
        # Cells of torch have no packed form, and stay as they are.
        packable = any(type(module) in packers() for module in layer.modules())
        return pack(layer, self.format) if self.format and packable else layer


TORCH = Way()


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one call: with weights in the cache, and with weights that no cache holds."""

    warm: float
    cold: float


def first_ways(formats: Iterable[str], specs: Sequence[tuple[tuple[int, int], int]], sparsity: float) -> list[Way]:
    """Torch's own, packed dense, and gated with every block and key size at one sparsity, in each format."""
    formats = tuple(formats)
    gated = [
        Way(format=name, sparsity=sparsity, block_size=block, key_size=key)
        for name, (block, key) in itertools.product(formats, specs)
    ]
    return [TORCH, *(Way(format=name) for name in formats), *gated]


def more_ways(seconds: Mapping[Way, float]) -> list[Way]:
    """For each format, the fastest gated way at the other sparsities: what is best at one level is good at all."""
    gated = sorted((way for way in seconds if way.sparsity is not None), key=seconds.__getitem__)
    best = {way.format: way for way in reversed(gated)}
    return [replace(way, sparsity=level) for way in best.values() for level in SPARSITIES if level != way.sparsity]


@torch.inference_mode()
def measure(layer: nn.Module, shape: tuple[int, ...], ways: Sequence[Way], *, seconds: float) -> dict[Way, Times]:
    """Times of one call of `layer` for an input of this shape, all ways in turn.

    Args:
        layer: dense, in float32 on the CPU; left as it is.
        shape: of its input.
        ways: what to compare.
        seconds: to spend on each way, about.
    """
    x = torch.randn(shape)
    layer = copy.deepcopy(layer).eval().requires_grad_(False)
    warm: dict[str, Callable[[], Any]] = {}
    cold: dict[str, Callable[[], Any]] = {}
    for way in ways:
        made = way.build(layer)
        copies = copies_past_cache(made)
        warm[str(way)] = partial(made, x)
        cold[str(way)] = in_turn(copies, lambda made: made(x))
    times = [interleave(calls, seconds=seconds / 2) for calls in (warm, cold)]
    return {way: Times(*(found[str(way)].median for found in times)) for way in ways}
