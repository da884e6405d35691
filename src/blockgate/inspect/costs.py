"""What the layers of a model cost at each level: multiply-adds with the gate's own, or measured seconds."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockgate.convert import pack
from blockgate.errors import invalid
from blockgate.formats import get_format
from blockgate.gates import Gate
from blockgate.inspect.counting import gated_size
from blockgate.inspect.timing import copies_past_cache, in_turn, interleave
from blockgate.runtime.linear import RunnableLinear
from blockgate.runtime.packed import PackedLinear

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from blockgate.formats import Format
    from blockgate.inspect.progress import Report

__all__ = ["macs_at", "time_levels"]

# Spent on each layer and level, about.
SECONDS = 0.1


def macs_at(layer: nn.Module, level: float, rows: int) -> float:
    """Multiply-adds of so many rows at a level: open blocks and gates; at 0 those of the layer without gates."""
    gates = [gate for gate in layer.modules() if isinstance(gate, Gate)]
    sizes = [gated_size(layer, gate) for gate in gates]
    if not level:
        return float(rows * sum(sizes))
    opened = [size * gate.target_density for size, gate in zip(sizes, gates, strict=True)]
    return rows * (sum(opened) + sum(gate.count_macs() for gate in gates))


@torch.inference_mode()
def time_levels(
    layers: Mapping[str, nn.Module],
    inputs: Mapping[str, Tensor],
    levels: Sequence[float],
    *,
    dtype: str | torch.dtype | Format,
    seconds: float = SECONDS,
    report: Report = lambda _done, _of: None,
) -> dict[str, dict[float, float]]:
    """Seconds of one call of each layer at each level, packed, with weights that no cache holds.

    Level 0 is the layer without its gate, packed dense. Layers of the same shape and options take the same, so one of
    them is measured.

    Args:
        layers: gated linear layers by name.
        inputs: what each is called with.
        levels: the sparsities, besides 0.
        dtype: the format they are packed to.
        seconds: to spend on each layer and level, about.
        report: told how many layers are done, and of how many.
    """
    stored_as = get_format(dtype)
    known: dict[Any, dict[float, float]] = {}
    found: dict[str, dict[float, float]] = {}
    for done, (name, layer) in enumerate(layers.items()):
        report(done, len(layers))
        if not isinstance(layer, RunnableLinear):
            raise invalid(
                "cost",
                expected="'macs', for a model whose gated layers aren't all linear ones",
                got=f"'time' and {type(layer).__name__} at {name!r}",
                remedy="Or pass costs=..., seconds that you have measured.",
            )
        x = inputs[name]
        key = (type(layer), layer.spec, layer.grid, layer.bias is None, tuple(x.shape))
        if key not in known:
            known[key] = _seconds_by_level(layer, x, levels, stored_as, seconds)
        found[name] = known[key]
    report(len(layers), len(layers))
    return found


def _seconds_by_level(
    layer: RunnableLinear, x: Tensor, levels: Sequence[float], stored_as: Format, seconds: float
) -> dict[float, float]:
    made: dict[float, nn.Module] = {0.0: PackedLinear(layer._matrix(), layer.bias, stored_as)}
    for level in levels:
        gated = copy.deepcopy(layer).eval()
        gated.gate.target_sparsity = level
        made[level] = pack(gated, stored_as)
    calls: dict[str, Callable[[], Any]] = {}
    for level, packed in made.items():
        calls[str(level)] = in_turn(copies_past_cache(packed), partial(_call, x))
    times = interleave(calls, seconds=seconds)
    return {level: times[str(level)].median for level in made}


def _call(x: Tensor, layer: nn.Module) -> Any:
    return layer(x)
