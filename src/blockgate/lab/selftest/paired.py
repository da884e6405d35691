"""Paired MLPs a second time: one gate for the rows of the up and the columns of the down projection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from blockgate.lab.selftest.formula import CERTAIN, Cut, gated_product
from blockgate.lab.selftest.numbers import Array, Number, Tape
from blockgate.lab.selftest.steps import stepped
from blockgate.lab.selftest.stored import decoded, format_of

if TYPE_CHECKING:
    from blockgate.lab.selftest.formula_side import FormulaSide

__all__ = ["paired_mlp"]


def paired_mlp(side: FormulaSide, x: Number) -> Number:
    """y (N, out) = down (g * f(up x)), or with a gate projection down (g * f(gate_proj x) * (up x)), for x (N, in)."""
    problem, tape, seen = side.problem, side.tape, side.built.x
    gate: Any = side.built.layer.gate
    gates = side.gates.get("gate")
    if gates is None:
        gates = side.gates_of_rows(gate, {"gate": "gate", "weight": "up.weight"}, x, seen)
        side.gates["gate"] = gates
    block = gate.grid.block[0]
    wide = Cut(problem.channels, problem.inputs, block, problem.inputs)
    opened = tape.leaf(gates.value != 0)
    up = _product(side, "up", x, opened, wide)
    if problem.glu:
        hidden = tape.mul(_activated(tape, _product(side, "gate_proj", x, opened, wide), problem.activation), up)
    else:
        hidden = _activated(tape, up, problem.activation)
    if side.half:
        hidden = side.narrow(hidden)
    if side.packed:
        # Closed channels are 0, and so have no say in how inputs of integers are rounded.
        mask = np.repeat(opened.value, min(block, problem.channels), 1)[:, : problem.channels]
        hidden = Number(hidden.value * mask, np.where(mask > 0, hidden.bound, 0))
    return _product(side, "down", hidden, gates, Cut(problem.out, problem.channels, problem.out, block))


def _product(side: FormulaSide, name: str, x: Number, gates: Number, cut: Cut) -> Number:
    """The gated product of one matrix, and its bias."""
    tape, parameters = side.tape, side.parameters
    tape.unit = side.eps
    if side.packed:
        module = side.packed[name]
        weight = tape.leaf(decoded(module)[0])
        x = stepped(tape, x, cut, format_of(module))
    else:
        weight = side.wide(side.leaf(f"{name}.weight", parameters[f"{name}.weight"]))
    bias = parameters.get(f"{name}.bias")
    y = gated_product(
        tape, side.wide(x), weight, None if bias is None else side.wide(side.leaf(f"{name}.bias", bias)), gates, cut
    )
    if side.half:
        # What follows is computed in the narrow type.
        y = side.narrow(y)
        tape.unit = torch.finfo(side.dtype).eps
    return y


def _activated(tape: Tape, a: Number, name: str) -> Number:
    if name == "relu":
        return tape.relu(a, CERTAIN)
    function = {"gelu": _gelu, "gelu_tanh": _gelu_tanh, "silu": _silu}[name]
    # Computed as x times something between 0 and 1, or 1 plus what cancels it.
    return tape.curve(a, function)


def _gelu(x: Array) -> tuple[Array, Array]:
    share = 0.5 * torch.from_numpy(-x / np.sqrt(2)).erfc().numpy()
    return x * share, share + x * np.exp(-0.5 * x * x) / np.sqrt(2 * np.pi)


def _gelu_tanh(x: Array) -> tuple[Array, Array]:
    root = np.sqrt(2 / np.pi)
    # Beyond, nothing changes, and cubes leave the range of numbers.
    near = np.clip(x, -30, 30)
    share = np.tanh(root * (near + 0.044715 * near**3))
    bent = 0.5 * near * (1 - share * share) * root * (1 + 3 * 0.044715 * near * near)
    return 0.5 * x * (1 + share), 0.5 * (1 + share) + bent


def _silu(x: Array) -> tuple[Array, Array]:
    share = 1 / (1 + np.exp(-x))
    return x * share, share * (1 + x * (1 - share))
