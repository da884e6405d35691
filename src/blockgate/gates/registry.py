"""The kinds of gates by name. A kind is one file: its class registers itself, in this package or in another one."""

from __future__ import annotations

from typing import TypeVar

import torch

from blockgate.errors import invalid
from blockgate.gates.base import Gate
from blockgate.grid import BlockGrid
from blockgate.spec import GateSpec

__all__ = ["GATE_KINDS", "gate_kinds", "make_gate", "register_gate"]

GATE_KINDS: dict[str, type[Gate]] = {}

Kind = TypeVar("Kind", bound=type[Gate])


def register_gate(kind: Kind) -> Kind:
    """Makes a subclass of `Gate` known by its `kind`, to layers, configs and checkpoints; a decorator."""
    names = (kind.kind, *kind.own_aliases())
    for name in names:
        if (known := GATE_KINDS.get(name, kind)) is not kind:
            raise invalid("register_gate", expected="a name that is free", got=name, remedy=f"{known} has it.")
    GATE_KINDS.update(dict.fromkeys(names, kind))
    return kind


def gate_kinds() -> tuple[str, ...]:
    """All names that `GateSpec.gate` may have."""
    return tuple(GATE_KINDS)


def make_gate(
    spec: GateSpec, grid: BlockGrid, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Gate:
    """The gate that a spec describes, for a grid. Options that the kind doesn't take are an error."""
    if spec.gate not in GATE_KINDS:
        raise invalid("gate", expected=f"one of {gate_kinds()}", got=spec.gate, remedy="The paper's gate is 'eq1'.")
    return GATE_KINDS[spec.gate](grid, spec, device=device, dtype=dtype)
