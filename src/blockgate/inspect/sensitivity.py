"""How much a trained model loses when one of its layers closes blocks: measured layer by layer, level by level."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockgate.convert.closeness import call, evaluating, floating_tensors
from blockgate.convert.forms import gated_classes
from blockgate.errors import invalid
from blockgate.find import named_gates, outermost
from blockgate.gates import Gate
from blockgate.grid import check_sparsity
from blockgate.inspect.costs import macs_at
from blockgate.inspect.progress import Progress, reporting
from blockgate.inspect.table import text_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["LEVELS", "LayerSensitivity", "Sensitivity", "check_batches", "dense_gates", "gated_layers", "sensitivity"]

LEVELS = (0.25, 0.5, 0.75)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSensitivity:
    """What one layer loses at every level."""

    name: str
    macs: float
    """Multiply-adds of its weights in all batches, with every block open."""
    costs: dict[float, float]
    """By level, multiply-adds of open blocks and gate in all batches; at 0, of the layer without a gate."""
    rows: int
    """Of its input, in all batches."""
    errors: dict[float, float]
    """By level, |y - y at sparsity 0| / |y at sparsity 0| of its output, for inputs from the model at sparsity 0."""
    losses: dict[float, float] | None = None
    """By level, how much the loss of the model rises when this layer alone has that sparsity."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """All layers, in the order of definition. Print it for a table."""

    layers: tuple[LayerSensitivity, ...]
    levels: tuple[float, ...]
    loss: float | None = None
    """Of the model at sparsity 0."""

    def to_dict(self) -> dict[str, Any]:
        """All of it in lists, dicts and numbers."""
        return asdict(self)

    def __str__(self) -> str:
        whole = sum(layer.macs for layer in self.layers)
        head = ["layer", "share", *(f"error at {level:.0%}" for level in self.levels)]
        head += [f"loss at {level:.0%}" for level in self.levels if self.loss is not None]
        rows = []
        for layer in self.layers:
            numbers = [f"{layer.errors[level]:.3f}" for level in self.levels]
            numbers += [f"{layer.losses[level]:+.4f}" for level in self.levels if layer.losses is not None]
            rows.append([layer.name, f"{layer.macs / whole:.1%}", *numbers])
        last = ["all", "100.0%", *([""] * (len(head) - 2))]
        return text_table(head, [*rows, last])


def sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    levels: Sequence[float] = LEVELS,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    progress: Progress = None,
) -> Sensitivity:
    """Measures what every gated layer loses at every level while all the others have all blocks open.

    The errors of the layers' outputs take one pass; losses take one for every layer and level.

    Args:
        model: gated, as `sparsify_` makes it. It runs in eval mode and is left as it was.
        batches: a few inputs like those it is for: tensors, tuples of arguments, or dicts of keyword arguments.
        levels: the sparsities to try.
        loss: from the model and a batch to its loss, such as `lambda model, batch: model(**batch).loss`. If None, only
            outputs of layers are compared.
        progress: True for a bar, or a function that is called with how many passes are done, and of how many.

    Returns:
        The result; print it for a table, or draw it with `blockgate.inspect.draw_sensitivity`. `bg.allocate` chooses
        levels by it.
    """
    wanted = tuple(check_sparsity(level, "levels") for level in levels)
    kept, layers = check_batches(batches), gated_layers(model)
    passes = 1 + (0 if loss is None else 1 + len(layers) * len(wanted))
    with reporting(progress, "sensitivity") as report, dense_gates(model), evaluating(model), torch.no_grad():
        report(0, passes)
        seen = _output_errors(model, layers, kept, wanted)
        report(1, passes)
        if loss is None:
            return Sensitivity(layers=tuple(LayerSensitivity(name=n, **seen[n]) for n in layers), levels=wanted)
        before = _mean_loss(model, kept, loss)
        done = 2
        rises: dict[str, dict[float, float]] = {}
        for name, layer in layers.items():
            rises[name] = {}
            for level in wanted:
                report(done, passes)
                with layer_at(layer, level):
                    rises[name][level] = _mean_loss(model, kept, loss) - before
                done += 1
        report(passes, passes)
    entries = tuple(LayerSensitivity(name=n, **seen[n], losses=rises[n]) for n in layers)
    return Sensitivity(layers=entries, levels=wanted, loss=before)


def gated_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The gated layers of a model by their first names; at least one."""
    named_gates(model)
    names: dict[nn.Module, str] = {}
    for name, layer in outermost(model, gated_classes()):
        names.setdefault(layer, name)
    return {name: layer for layer, name in names.items()}


def check_batches(batches: Iterable[Any]) -> list[Any]:
    """The batches as a list; an error if there are none, or if one input was passed instead."""
    kept = [] if isinstance(batches, (Tensor, dict)) else list(batches)
    if not kept:
        raise invalid(
            "batches", expected="a list of inputs", got=type(batches).__name__, remedy="Put a single input in a list."
        )
    return kept


@contextmanager
def dense_gates(model: nn.Module) -> Iterator[None]:
    """All blocks of all layers open; at the end every gate has the sparsity it had."""
    with layer_at(model, 0.0):
        yield


@contextmanager
def layer_at(layer: nn.Module, level: float) -> Iterator[None]:
    """The gates inside of a module at one sparsity, for a while."""
    gates = [gate for gate in layer.modules() if isinstance(gate, Gate)]
    before = [gate.target_sparsity for gate in gates]
    try:
        for gate in gates:
            gate.target_sparsity = level
        yield
    finally:
        for gate, target in zip(gates, before, strict=True):
            gate.target_sparsity = target


def _output_errors(
    model: nn.Module, layers: dict[str, nn.Module], batches: list[Any], levels: tuple[float, ...]
) -> dict[str, dict[str, Any]]:
    squares = {name: dict.fromkeys((0.0, *levels), 0.0) for name in layers}
    rows = dict.fromkeys(layers, 0)

    def compare(name: str, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        dense = [t.double() for t in floating_tensors(output)]
        squares[name][0.0] += sum(t.square().sum().item() for t in dense)
        first = next(floating_tensors((args, kwargs)))
        rows[name] += first.numel() // max(1, first.shape[-1])
        for level in levels:
            with layer_at(layer, level):
                # Not through __call__, whose hooks this is one of.
                changed = floating_tensors(layer.forward(*args, **kwargs))
                moved = sum((a.double() - b).square().sum().item() for a, b in zip(changed, dense, strict=True))
            squares[name][level] += moved if level else 0.0

    handles = [
        layer.register_forward_hook(
            lambda module, args, kwargs, output, name=name: compare(name, module, args, kwargs, output),
            with_kwargs=True,
        )
        for name, layer in layers.items()
    ]
    try:
        for batch in batches:
            call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    found: dict[str, dict[str, Any]] = {}
    for name, layer in layers.items():
        whole = squares[name][0.0] or 1.0
        errors = {level: (squares[name][level] / whole) ** 0.5 if level else 0.0 for level in levels}
        costs = {}
        for level in (0.0, *levels):
            with layer_at(layer, level):
                costs[level] = macs_at(layer, level, rows[name])
        found[name] = {"macs": costs[0.0], "costs": costs, "rows": rows[name], "errors": errors}
    return found


def _mean_loss(model: nn.Module, batches: list[Any], loss: Callable[[nn.Module, Any], Tensor]) -> float:
    return sum(float(loss(model, batch)) for batch in batches) / len(batches)
