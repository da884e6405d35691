"""One layer of the library's recurrent stacks, step by step: what its gates read, which tells what they choose by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from blockgate.lab.selftest.library import STACKED
from blockgate.runtime import PackedGRU, PackedLSTM

if TYPE_CHECKING:
    from torch import Tensor

    from blockgate.lab.selftest.formula_side import FormulaSide

__all__ = ["Read", "library_layer"]

PACKED: dict[str, Any] = {"lstm": PackedLSTM, "gru": PackedGRU}


class Read(NamedTuple):
    """Output (R, H) of a layer, and the states (N, H) that its gates read, step by step."""

    output: Tensor
    states: list[Tensor]


def library_layer(side: FormulaSide, suffix: str, rows: Tensor, state: tuple[Tensor, ...]) -> Read:
    """A layer in one direction over rows (R, in), in the order in which it reads them, from its state (1, N, H)."""
    problem, layer = side.problem, side.built.layer
    kind = "gru" if problem.layer.startswith("gru") else "lstm"
    if side.packed:
        packed = PACKED[kind]({f"{p}_l0": side.packed[f"{p}{suffix}"] for p in ("ih", "hh")}, batch_first=False)
        return _steps_of(side, packed, rows, state)
    one = STACKED[kind](rows.shape[1], problem.out, 1, problem.bias, dtype=side.dtype, **problem.options())
    for part in ("ih", "hh"):
        for what in ("weight", "bias"):
            setattr(one, f"{what}_{part}_l0", getattr(layer, f"{what}_{part}{suffix}"))
        setattr(one, f"gate_{part}_l0", getattr(layer, f"gate_{part}{suffix}"))
    training = [(gate, gate.training) for gate in one.modules()]
    with side.as_before(getattr(layer, f"gate_hh{suffix}"), f"gate_hh{suffix}"):
        found = _steps_of(side, one.eval(), rows, state)
    for module, mode in training:
        module.training = mode
    return found


def _steps_of(side: FormulaSide, one: Any, rows: Tensor, state: tuple[Tensor, ...]) -> Read:
    outputs, read, first = [], [], 0
    before = {name: b.clone() for name, b in one.named_buffers()}
    with torch.no_grad():
        for alive in side.built.alive:
            state = tuple(s[:, :alive].contiguous() for s in state)
            read.append(state[0][0])
            x = rows[first : first + alive].unsqueeze(0).contiguous()
            y, after = one(x, state[0] if len(state) == 1 else state)
            state = (after,) if len(state) == 1 else after
            outputs.append(y[0])
            first += alive
    assert all(torch.equal(b, before[name]) for name, b in one.named_buffers()), "the judge changed the layer"
    return Read(torch.cat(outputs), read)
