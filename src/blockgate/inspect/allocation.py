"""Which layers should close how many blocks, for a saving in total."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from blockgate.convert.closeness import call, evaluating
from blockgate.errors import invalid
from blockgate.grid import check_size, check_sparsity
from blockgate.inspect.costs import time_levels
from blockgate.inspect.progress import Progress, reporting
from blockgate.inspect.sensitivity import (
    LEVELS,
    LayerSensitivity,
    Sensitivity,
    check_batches,
    gated_layers,
    sensitivity,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor, nn

    from blockgate.formats import Format

__all__ = ["Allocation", "allocate"]

COSTS = ("macs", "time")
NAMES = {"macs": "multiply-adds", "time": "time", "costs": "the costs"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """A sparsity for every layer, 0 for those that stay as they are. Print it for a table."""

    sparsities: dict[str, float]
    saved: float
    """Share of the total cost that this saves, that of the gates counted. Layers at 0 have no gate."""
    cost: str
    """What is saved: "macs", "time" or "costs", as they were given."""
    expected: float
    """The sum over layers of what each costs: rises of the loss, or squared relative errors of outputs."""

    def options(self) -> dict[str, dict[str, Any] | None]:
        """For `sparsify_(dense_model, allocation, ...)`: the sparsity of each layer, None for those to leave dense."""
        return {name: {"sparsity": level} if level else None for name, level in self.sparsities.items()}

    def __str__(self) -> str:
        width = max(map(len, self.sparsities))
        lines = [f"{name:<{width}}  {level:.0%}" for name, level in self.sparsities.items()]
        last = f"{self.saved:.1%} of {NAMES[self.cost]} saved, gates counted; expected harm {self.expected:.4g}"
        return "\n".join([*lines, last])


def allocate(
    model: nn.Module,
    batches: Iterable[Any],
    budget: float,
    *,
    levels: Sequence[float] = LEVELS,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    cost: str = "macs",
    format: str | torch.dtype | Format = "int8",  # noqa: A002
    rows: int = 1,
    costs: Mapping[str, Mapping[float, float]] | None = None,
    measured: Sensitivity | None = None,
    progress: Progress = None,
) -> Allocation:
    """Chooses a sparsity for each gated layer, so that the whole saves `budget` where it hurts least.

    Greedy: again and again, the layer and level of the least harm per saving. What layers lose is measured one at a
    time, and taken to add up.

    Args:
        model: gated, as `sparsify_` makes it; left as it was. `bg.set_sparsity(model, allocation.sparsities)` applies
            the result to it, `bg.sparsify_(dense_model, allocation, ...)` to a dense model.
        batches: as for `sensitivity`.
        budget: the share of the cost to save, in [0, 1).
        levels: the sparsities to choose from, besides 0.
        loss: as for `sensitivity`: if given, the rise of the loss is the harm; if None, the squared relative error of
            each layer's output, which knows nothing of what later layers make of it.
        cost: what to save. "macs": multiply-adds, those of the gates counted. "time": seconds, measured here for each
            layer and level, packed, gate included; at 0 the layer is packed without its gate. Linear layers only.
        format: for "time", the format that layers are packed to.
        rows: for "time", how many rows of input a call has: 1 for decoding.
        costs: instead, what all rows of the batches cost by layer and level (0 included).
        measured: what `sensitivity` returned for this model, so that it need not be measured again.
        progress: as for `sensitivity`.

    Returns:
        The allocation. An error if all layers at their highest level would save less than the budget.
    """
    check_sparsity(budget, "budget")
    if cost not in COSTS:
        raise invalid("cost", expected=f"one of {COSTS}", got=cost, remedy="Or pass your own as costs=...")
    kept = check_batches(batches)
    known = measured or sensitivity(model, kept, levels=levels, loss=loss, progress=progress)
    if costs is None and cost == "time":
        costs = _timed(model, kept, known, format, check_size("rows", rows), progress)
    elif costs is not None:
        cost = "costs"
    ladders = {layer.name: _ladder(layer, known.levels, costs) for layer in known.layers}
    total = sum(ladder[0.0][0] for ladder in ladders.values())
    chosen = dict.fromkeys(ladders, 0.0)
    most = 1 - sum(min(cost for cost, _ in ladder.values()) for ladder in ladders.values()) / total
    if most < budget - 1e-9:
        raise invalid(
            "budget",
            expected=f"at most {most:.3g}, which all layers at their cheapest level save",
            got=budget,
            remedy="Add higher levels, or gate more layers.",
        )

    def saved() -> float:
        return 1 - sum(ladders[name][level][0] for name, level in chosen.items()) / total

    while saved() < budget - 1e-9:
        steps = []
        for name, level in chosen.items():
            now, harm = ladders[name][level]
            for higher, (less, more) in ladders[name].items():
                if less < now:
                    steps.append((max(0.0, more - harm) / (now - less), name, higher))
        _, name, level = min(steps)
        chosen[name] = level
    return Allocation(
        sparsities=chosen,
        saved=saved(),
        cost=cost,
        expected=sum(ladders[name][level][1] for name, level in chosen.items()),
    )


def _timed(
    model: nn.Module, batches: list[Any], known: Sensitivity, dtype: str | torch.dtype | Format, rows: int, to: Progress
) -> dict[str, dict[float, float]]:
    """What all rows of the batches take by layer and level, from measured calls of so many rows."""
    layers = gated_layers(model)
    inputs: dict[str, Tensor] = {}

    def see(name: str, x: Tensor) -> None:
        inputs.setdefault(name, x.detach().reshape(-1, x.shape[-1]))

    with ExitStack() as stack:
        for name, layer in layers.items():
            hook = layer.register_forward_pre_hook(lambda _, args, name=name: see(name, args[0]))
            stack.callback(hook.remove)
        with evaluating(model), torch.no_grad():
            call(model, batches[0])
    chosen = {name: inputs[name].repeat(-(-rows // len(inputs[name])), 1)[:rows] for name in layers}
    with reporting(to, "times") as report:
        seconds = time_levels(layers, chosen, known.levels, dtype=dtype, report=report)
    calls = {layer.name: layer.rows / rows for layer in known.layers}
    return {name: {level: calls[name] * s for level, s in found.items()} for name, found in seconds.items()}


def _ladder(
    layer: LayerSensitivity, levels: Sequence[float], costs: Mapping[str, Mapping[float, float]] | None
) -> dict[float, tuple[float, float]]:
    """Cost and harm of a layer at every level, 0 included."""
    if costs is not None and not {0.0, *levels} <= set(costs.get(layer.name, ())):
        raise invalid(
            "costs", expected=f"one for 0 and each level of {layer.name!r}", got=costs.get(layer.name), remedy="Add it."
        )
    ladder = {}
    for level in (0.0, *levels):
        cost = (layer.costs if costs is None else costs[layer.name])[level]
        harm = 0.0 if not level else layer.errors[level] ** 2 if layer.losses is None else layer.losses[level]
        ladder[level] = (cost, harm)
    return ladder
