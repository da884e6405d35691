"""Problems for the ops of the gated LSTM and GRU, and their gradients by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from blockgate.grid import BlockGrid
from blockgate.ops.gated_gru import gated_gru
from blockgate.ops.gated_lstm import gated_lstm

WEIGHTS = ["weight", "bias", "gate_weight", "gate_bias", "hidden_weight", "hidden_bias"]


def lstm_step(from_input, from_state, state):
    i, f, g, o = (from_input + from_state).chunk(4, 1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def gru_step(from_input, from_state, state):
    (x_r, x_z, x_n), (h_r, h_z, h_n) = from_input.chunk(3, 1), from_state.chunk(3, 1)
    z = torch.sigmoid(x_z + h_z)
    n = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
    return ((1 - z) * n + z * state[0],)


@dataclass(frozen=True)
class Cell:
    """An op for a whole recurrence, and one step of it in plain torch."""

    name: str
    gates: int
    names: tuple[str, ...]
    op: Callable
    step: Callable

    @property
    def states(self):
        """How many tensors the state has."""
        return len(self.names) - 1 - len(WEIGHTS)

    def run(self, *tensors, **options):
        """Output, and of an LSTM the last c."""
        result = self.op(*tensors, **options)
        return result if isinstance(result, tuple) else (result,)


LSTM = Cell("gated_lstm", 4, ("projected", "h0", "c0", *WEIGHTS), gated_lstm, lstm_step)
GRU = Cell("gated_gru", 3, ("projected", "h0", *WEIGHTS), gated_gru, gru_step)
EACH_CELL = pytest.mark.parametrize("cell", [LSTM, GRU], ids=["lstm", "gru"])


@dataclass
class Case:
    steps: int
    rows: int
    size: int
    block: tuple[int, int]
    share: float = 0.5
    key: tuple[int, int] | None = None  # offset, size
    hidden: int | None = None
    per_row: bool = False
    normalise: str = "mean"
    bias: bool = True
    closed: bool = False

    def __str__(self):
        return "-".join(str(v) for v in vars(self).values() if v is not None)


CASES = [
    Case(4, 3, 32, (16, 16)),
    Case(3, 1, 20, (7, 5), key=(4, 9)),
    Case(1, 5, 33, (16, 16), hidden=3),
    Case(1, 1, 17, (4, 3), 0.3),
    Case(5, 2, 10, (128, 128)),
    Case(3, 7, 48, (16, 48), per_row=True, normalise="rms"),
    Case(4, 5, 48, (16, 12), 0.5, per_row=True, normalise="margin"),
    Case(3, 2, 20, (8, 20), 0.3, hidden=6, normalise="margin"),
    Case(4, 5, 48, (16, 12), 0.0, per_row=True, normalise="margin_near_dense"),
    Case(3, 20, 64, (32, 32), 0.1, key=(5, 40), normalise="none", bias=False),
    Case(6, 2, 50, (50, 13), 1.0, hidden=18, normalise="rms"),
    Case(2, 40, 40, (24, 8), 0.2, per_row=True),
    Case(3, 4, 24, (8, 8), closed=True),
    Case(2, 3, 130, (64, 32), 0.6),
    Case(4, 20, 48, (64, 4), 0.5, per_row=True, normalise="margin"),
    Case(3, 7, 35, (64, 4), 0.3),
    Case(3, 5, 33, (128, 2), 0.6, per_row=True, normalise="rms"),
    Case(3, 40, 41, (100, 8), 0.9),
]


def problem(case: Case, dtype=torch.float32, cell: Cell = LSTM):
    out = cell.gates * case.size
    grid = BlockGrid(out, case.size, case.block)
    key_offset, key_size = case.key or (0, case.size)
    scored = case.hidden or key_size

    def make(*shape, spread=1.0):
        return (spread * torch.randn(shape, dtype=dtype)).requires_grad_()

    tensors = [
        make(case.steps, case.rows, out),
        *(make(case.rows, case.size) for _ in range(cell.states)),
        make(out, case.size, spread=case.size**-0.5),
        make(out) if case.bias else None,
        make(grid.num_blocks, scored),
        make(grid.num_blocks) if case.bias else None,
        make(case.hidden, key_size) if case.hidden else None,
        make(case.hidden) if case.hidden and case.bias else None,
    ]
    if case.closed:
        with torch.no_grad():
            tensors[-4].zero_()
            tensors[-3].fill_(-1)
    groups = grid.out_blocks if case.per_row else 1
    options = {
        "key_offset": key_offset,
        "key_size": key_size,
        "block": case.block,
        "open_blocks": max(1, round(case.share * grid.num_blocks / groups)),
        "groups": groups,
        "normalise": case.normalise,
    }
    return tensors, options


def named_gradients(results, tensors, grads):
    names = LSTM.names if len(tensors) == len(LSTM.names) else GRU.names
    inputs = {name: t for name, t in zip(names, tensors, strict=True) if t is not None}
    found = torch.autograd.grad(results, list(inputs.values()), grads, materialize_grads=True, retain_graph=True)
    return dict(zip(inputs, found, strict=True))
