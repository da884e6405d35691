"""Conclusions from times: which layers to gate, how, in which format, and what the whole model gains."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from blockgate.inspect.advice.measure import SPARSITIES, TORCH, Way
from blockgate.inspect.table import text_columns

__all__ = ["Advice", "LayerAdvice", "Measured", "draw_advice"]

# A gated layer must save this share of the best dense time: quality is not given away for noise.
LEAST_GAIN = 0.05

# Formats whose rounding deserves a word.
ROUNDS_MORE = ("int4", "int8a8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One layer and the seconds that all its calls take for the example, by way.

    Attributes:
        name, kind: of the layer.
        matrices: shapes of its weights, as text.
        calls: shapes of its inputs and how often they come, as text.
        seconds: by way; empty for a layer that was not called.
        leave: why it is not to be gated, whatever the times say; "" if times decide.
    """

    name: str
    kind: str
    matrices: str
    calls: str
    seconds: dict[Way, float]
    leave: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerAdvice:
    """What to do with one layer. Times are seconds of all its calls for the example input."""

    name: str
    kind: str
    matrices: str
    calls: str
    torch: float | None
    """As it is; None if the example never ran it."""
    packed: float | None
    """Dense, packed to the advised format."""
    gated: dict[float, float]
    """By sparsity, packed alike, with the blocks and the key below; empty if it can't be gated."""
    gate: bool
    """Whether to gate it."""
    pack: bool
    """Whether to pack it; torch's own product is faster otherwise."""
    block_size: tuple[int, int] | None
    key_size: int | None
    why: str
    training: dict[str, float] = field(default_factory=dict)
    """Seconds of a step of training, forward and backward for 256 rows: "torch", and by the sparsity of the gated
    layer, "0" and the one planned for; empty for layers that stay dense."""

    @property
    def dense(self) -> float:
        """The faster dense way."""
        return min((seconds for seconds in (self.torch, self.packed) if seconds is not None), default=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What pays on this machine. Print it for a table; `bg.sparsify_(model, advice)` follows it."""

    layers: tuple[LayerAdvice, ...]
    format: str
    """What to pack the model to."""
    sparsity: float
    """The level that was planned for."""
    cold: bool
    """Whether the model is larger than the cache, so that times with cold weights decide."""
    model: float
    """Seconds of the whole model for the example, as it is."""
    packed: float
    """The same, packed and dense, by the times of its layers."""
    gated: dict[float, float]
    """The same by sparsity, with the advised layers gated."""

    @property
    def to_gate(self) -> tuple[LayerAdvice, ...]:
        """The layers to gate."""
        return tuple(layer for layer in self.layers if layer.gate)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What speaks against the advice, a sentence or two each: levels and training that are slower than torch."""
        found = []
        slower = [level for level, seconds in self.gated.items() if self.to_gate and seconds > self.packed]
        if slower:
            levels = ", ".join(f"{level:.0%} ({self.packed / self.gated[level]:.2f}x)" for level in slower)
            found.append(f"Gated is slower than the dense model at a sparsity of {levels}.")
        for level, when in (("0", "at the start of a ramp (sparsity 0)"), (f"{self.sparsity:g}", "at the end")):
            speed = self._training_speed(level)
            if speed is not None and speed < 1:
                found.append(f"Training is slower {when}: the gated layers run at {speed:.2f}x the speed of torch's.")
        if self.format in ROUNDS_MORE:
            found.append(
                f"{self.format} rounds more than int8 with float inputs: measure the quality of the packed model."
            )
        return tuple(found)

    def _training_speed(self, level: str) -> float | None:
        """How fast the gated layers train, over torch's; None if nobody has measured it."""
        timed = [layer.training for layer in self.to_gate if layer.training]
        if not timed:
            return None
        return sum(times["torch"] for times in timed) / sum(times[level] for times in timed)

    def options(self) -> dict[str, dict[str, Any] | None]:
        """For the `options` of `sparsify_`: what every layer gets, None for those to leave dense."""
        return {
            layer.name: {"block_size": layer.block_size, "key_size": layer.key_size, "sparsity": self.sparsity}
            if layer.gate
            else None
            for layer in self.layers
        }

    def packs(self, module: nn.Module, name: str) -> bool:  # noqa: ARG002
        """For the `filter_fn` of `pack`: False for layers that torch runs faster."""
        return all(layer.pack for layer in self.layers if layer.name == name)

    def to_dict(self) -> dict[str, Any]:
        """All of it in lists, dicts and numbers, for JSON."""
        return asdict(self) | {"warnings": self.warnings}

    def __str__(self) -> str:
        head = ["layer", "weights", "calls", "torch ms", "packed ms", *(f"{s:.0%}" for s in SPARSITIES), "advice"]
        # Layers that differ in a number alone are one row: "blocks.*.mlp (12)".
        names: dict[tuple[str, ...], list[str]] = {}
        for layer in self.layers:
            times = (layer.torch, layer.packed, *map(layer.gated.get, SPARSITIES))
            cells = (re.sub(r"\d+", "*", layer.name), layer.matrices, layer.calls, *map(_ms, times), layer.why)
            names.setdefault(cells, []).append(layer.name)
        rows = [
            [found[0] if len(found) == 1 else f"{cells[0]} ({len(found)})", *cells[1:]]
            for cells, found in names.items()
        ]
        totals = ["whole model", "", "", *map(_ms, (self.model, self.packed, *map(self.gated.get, SPARSITIES))), ""]
        table = text_columns(head, [*rows, totals])
        weights = "not in the cache" if self.cold else "in the cache"
        said = f"Times for all calls of the example, packed to {self.format}, weights {weights}."
        said += "".join(f"\nWarning: {warning}" for warning in self.warnings)
        if not self.to_gate:
            return f"{table}\n{said}\nGate nothing: packed dense layers are as fast here."
        gain = self.model / self.gated[self.sparsity]
        beside = self.packed / self.gated[self.sparsity]
        return (
            f"{table}\n{said}\nGate {len(self.to_gate)} of {len(self.layers)} layers: at {self.sparsity:.0%} expect "
            f"{gain:.2f}x the speed of torch as it is, {beside:.2f}x that of the packed dense model."
        )

    __repr__ = __str__


def draw_advice(
    measured: Sequence[Measured], formats: Sequence[str], model: float, sparsity: float, cold: bool
) -> Advice:
    """The advice for the format in which the whole model is fastest at the planned sparsity.

    Args:
        measured: all layers.
        formats: those to choose from.
        model: seconds of the whole model as it is.
        sparsity: one of `SPARSITIES`.
        cold: which times these are.
    """
    plans = [_planned(measured, name, model, sparsity, cold) for name in formats]
    return min(plans, key=lambda plan: plan.gated[sparsity])


def _planned(measured: Sequence[Measured], format_name: str, model: float, sparsity: float, cold: bool) -> Advice:
    layers = tuple(_of_layer(layer, format_name, sparsity) for layer in measured)
    # What the layers don't account for stays as it is.
    rest = max(0.0, model - sum(layer.torch or 0.0 for layer in layers))
    return Advice(
        layers=layers,
        format=format_name,
        sparsity=sparsity,
        cold=cold,
        model=model,
        packed=rest + sum(layer.dense for layer in layers),
        gated={
            level: rest + sum(layer.gated[level] if layer.gate else layer.dense for layer in layers)
            for level in SPARSITIES
        },
    )


def _of_layer(layer: Measured, format_name: str, sparsity: float) -> LayerAdvice:
    torch = layer.seconds.get(TORCH)
    packed = layer.seconds.get(Way(format=format_name))
    gated = {
        way: seconds for way, seconds in layer.seconds.items() if way.format == format_name and way.sparsity == sparsity
    }
    best = min(gated, key=gated.__getitem__, default=None)
    times = {
        way.sparsity: seconds
        for way, seconds in layer.seconds.items()
        if best
        and way.sparsity
        and (way.format, way.block_size, way.key_size) == (format_name, best.block_size, best.key_size)
    }
    gate, why = False, layer.leave
    if torch is None or packed is None:
        why = why or "leave it: the example never ran it"
    elif best is None:
        why = f"leave it dense: {why or 'too small to pay'}"
    else:
        dense = min(torch, packed)
        gate = not layer.leave and gated[best] <= (1 - LEAST_GAIN) * dense
        ratio = f"{dense / gated[best]:.2f}x"
        if gate:
            why = f"gate: {ratio} at {sparsity:.0%}, {best.gate}"
        else:
            why = f"leave it dense: {layer.leave or f'gated {ratio} at {sparsity:.0%}'}"
    return LayerAdvice(
        name=layer.name,
        kind=layer.kind,
        matrices=layer.matrices,
        calls=layer.calls,
        torch=torch,
        packed=packed,
        gated=times,
        gate=gate,
        # A gated layer is packed in any case: its times are those of packed blocks.
        pack=gate or torch is None or packed is None or packed <= torch,
        block_size=best.block_size if gate and best else None,
        key_size=best.key_size if gate and best else None,
        why=why,
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3f}"
