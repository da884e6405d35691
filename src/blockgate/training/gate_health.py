"""Whether gates still choose: how often each block opens, and a warning when a layer opens the same ones always."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blockgate.gating import Gate

__all__ = ["GateCounts", "count_gates", "gate_health", "has_gates"]

# A block that opens for less or more of the inputs than this counts as always off or always on (the paper's rule).
RARELY, MOSTLY = 0.05, 0.95

# A layer has collapsed when a smaller share of its blocks depends on the input.
COLLAPSED = 0.05


@dataclass(kw_only=True, slots=True)
class GateCounts:
    """How often each block of a layer was open, (num_blocks,), among how many rows, a number; both float64."""

    opened: Tensor
    rows: Tensor
    target_density: float


def has_gates(model: nn.Module) -> bool:
    """Whether a model has any gated layer."""
    return any(isinstance(module, Gate) for module in model.modules())


@contextmanager
def count_gates(model: nn.Module) -> Iterator[dict[str, GateCounts]]:
    """Counts which blocks open, by the name of the gate, as long as the context lasts."""
    counts: dict[str, GateCounts] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, Gate):
            opened = torch.zeros(module.grid.num_blocks, dtype=torch.float64, device=module.weight.device)
            counts[name] = GateCounts(opened=opened, rows=opened.new_zeros(()), target_density=module.target_density)
            handles.append(module.register_forward_hook(_counter(counts[name])))
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def gate_health(counts: dict[str, GateCounts]) -> tuple[dict[str, float], list[str]]:
    """Measured density, input-dependent and dead shares over all layers, and warnings about collapsed ones."""
    seen = {name: count.opened / count.rows for name, count in counts.items() if count.rows}
    if not seen:
        return {}, []
    shares = torch.cat(list(seen.values()))
    depends = (shares >= RARELY) & (shares <= MOSTLY)
    metrics = {
        "density": float(shares.mean()),
        "input_dependent": float(depends.double().mean()),
        "dead_blocks": float((shares == 0).double().mean()),
    }
    warnings = []
    for name, share in seen.items():
        changing = float(((share >= RARELY) & (share <= MOSTLY)).double().mean())
        dead = float((share == 0).double().mean())
        if changing < COLLAPSED and counts[name].target_density < 1:
            warnings.append(
                f"{name} has collapsed: {changing:.0%} of its blocks depend on the input, {dead:.0%} never open. "
                "Lower the learning rate (of the gates: optimizer.gate_lr), or let the sparsity rise more slowly."
            )
    return metrics, warnings


def _counter(count: GateCounts) -> Callable[..., None]:
    def add(gate: nn.Module, args: object, gates: tuple[Tensor, Tensor]) -> None:  # noqa: ARG001
        values, indices = gates
        count.opened.scatter_add_(0, indices.flatten(), (values > 0).flatten().double())
        count.rows += len(values)

    return add
