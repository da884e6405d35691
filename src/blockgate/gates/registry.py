"""The kinds of gates by name. A kind is one file: its class registers itself, in this package or in another one."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch

from blockgate.errors import invalid
from blockgate.gates.base import Gate
from blockgate.grid import BlockGrid
from blockgate.spec import GateSpec

__all__ = ["GATE_KINDS", "gate_kinds", "make_gate", "register_gate"]

GATE_KINDS: dict[str, type[Gate]] = {}

# The options of GateSpec that only some kinds take, each with its value where it is unset.
OPTIONS_OF_KINDS = ("normalise", "select")

Kind = TypeVar("Kind", bound=type[Gate])


def register_gate(kind: Kind) -> Kind:
    """Makes a subclass of `Gate` known by its `kind`, to layers, configs and checkpoints; a decorator."""
    for name in (kind.kind, *kind.aliases):
        known = GATE_KINDS.setdefault(name, kind)
        if known is not kind:
            raise invalid("register_gate", expected="a name that is free", got=name, remedy=f"{known} has it.")
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
    kind = GATE_KINDS[spec.gate]
    meant = kind.aliases.get(spec.gate, {})
    given = {name: value for name in OPTIONS_OF_KINDS if (value := getattr(spec, name)) is not None}
    foreign = {
        name: value
        for name, value in given.items()
        if name not in kind.own_options or (meant and value != meant.get(name))
    }
    if foreign:
        raise invalid(
            "normalise and select",
            expected=f"neither with gate={spec.gate!r}",
            got=foreign,
            remedy="Only gate='topk' has these options; leave both unset, or None.",
        )
    return kind(grid, replace(spec, **meant), device=device, dtype=dtype)
