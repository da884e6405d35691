"""Gates: small trained networks that decide, for every input, which blocks of a weight matrix open."""

from __future__ import annotations

from typing import Any

from blockgate.errors import invalid
from blockgate.gating.base import Gate
from blockgate.gating.sigmoid import SigmoidGate
from blockgate.gating.softmax_sum import SoftmaxSumGate
from blockgate.gating.topk import TopKGate
from blockgate.grid import BlockGrid

__all__ = ["GATE_KINDS", "Gate", "SigmoidGate", "SoftmaxSumGate", "TopKGate", "make_gate"]

GATE_KINDS: dict[str, type[Gate]] = {gate.kind: gate for gate in (TopKGate, SoftmaxSumGate, SigmoidGate)}


def make_gate(kind: str, grid: BlockGrid, *, normalise: str = "mean", select: str = "global", **options: Any) -> Gate:
    """Makes a gate by its name; `normalise` and `select` other than the defaults are for gate="topk" alone."""
    if not isinstance(kind, str) or kind not in GATE_KINDS:
        raise invalid("gate", expected=f"one of {tuple(GATE_KINDS)}", got=kind, remedy="The paper's gate is 'topk'.")
    if kind == TopKGate.kind:
        return TopKGate(grid, normalise=normalise, select=select, **options)
    if (normalise, select) != ("mean", "global"):
        raise invalid(
            "normalise and select",
            expected=f"their defaults with gate={kind!r}",
            got=(normalise, select),
            remedy="Only gate='topk' has these options.",
        )
    return GATE_KINDS[kind](grid, **options)
