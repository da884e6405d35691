"""Gates: small trained networks that decide, for every input, which blocks of a weight matrix open."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from blockgate.errors import invalid
from blockgate.gates.base import Gate
from blockgate.gates.sigmoid import SigmoidGate
from blockgate.gates.softmax_sum import SoftmaxSumGate
from blockgate.gates.topk import TopKGate
from blockgate.grid import BlockGrid

__all__ = ["GATE_KINDS", "Gate", "SigmoidGate", "SoftmaxSumGate", "TopKGate", "make_gate"]

EQ1: dict[str, Any] = {"normalise": "mean", "select": "global"}

GATE_KINDS: dict[str, Callable[..., Gate]] = {
    TopKGate.kind: TopKGate,
    # The paper's gate as printed; not a kind of its own, but one word for two options.
    "eq1": partial(TopKGate, **EQ1),
    SoftmaxSumGate.kind: SoftmaxSumGate,
    SigmoidGate.kind: SigmoidGate,
}


def make_gate(
    kind: str, grid: BlockGrid, *, normalise: str | None = None, select: str | None = None, **options: Any
) -> Gate:
    """Makes a gate by its name; `normalise` and `select` are for gate="topk" alone, which has defaults for them."""
    if not isinstance(kind, str) or kind not in GATE_KINDS:
        raise invalid("gate", expected=f"one of {tuple(GATE_KINDS)}", got=kind, remedy="The paper's gate is 'eq1'.")
    given = {name: value for name, value in (("normalise", normalise), ("select", select)) if value is not None}
    said_twice = kind == "eq1" and given.items() <= EQ1.items()
    if given and kind != TopKGate.kind and not said_twice:
        raise invalid(
            "normalise and select",
            expected=f"neither with gate={kind!r}",
            got=given,
            remedy="Only gate='topk' has these options; leave both unset, or None.",
        )
    return GATE_KINDS[kind](grid, **given, **options)
