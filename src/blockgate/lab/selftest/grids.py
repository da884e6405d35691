"""What a gate of the library was asked to do, in the formula's words."""

from __future__ import annotations

from typing import Any

from blockgate.lab.selftest.formula import Cut, GateRule

__all__ = ["cut_of", "rule_of"]


def cut_of(gate: Any) -> Cut:
    """The grid of a gate, with blocks no larger than the weight."""
    grid = gate.grid
    return Cut(
        grid.out_features, grid.in_features, min(grid.block[0], grid.out_features), min(grid.block[1], grid.in_features)
    )


def rule_of(gate: Any) -> GateRule:
    """What a gate was asked to do."""
    return GateRule(
        kind=gate.kind,
        normalise="none" if gate.kind == "norm" else getattr(gate, "normalise", "mean"),
        groups=gate.grid.out_blocks if gate.kind == "norm" else getattr(gate, "groups", 1),
        kept=gate.open_blocks,
        offset=gate.key_offset,
        size=gate.key_size,
        soft=gate.training,
        temperature=getattr(gate, "temperature", 1.0),
    )
