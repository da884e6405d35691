"""Problems for the ops of the gated LSTM, and their gradients by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blockgate.grid import BlockGrid

NAMES = ["projected", "h0", "c0", "weight", "bias", "gate_weight", "gate_bias", "hidden_weight", "hidden_bias"]


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


def problem(case: Case, dtype=torch.float32):
    grid = BlockGrid(4 * case.size, case.size, case.block)
    key_offset, key_size = case.key or (0, case.size)
    scored = case.hidden or key_size

    def make(*shape, spread=1.0):
        return (spread * torch.randn(shape, dtype=dtype)).requires_grad_()

    tensors = [
        make(case.steps, case.rows, 4 * case.size),
        make(case.rows, case.size),
        make(case.rows, case.size),
        make(4 * case.size, case.size, spread=case.size**-0.5),
        make(4 * case.size) if case.bias else None,
        make(grid.num_blocks, scored),
        make(grid.num_blocks) if case.bias else None,
        make(case.hidden, key_size) if case.hidden else None,
        make(case.hidden) if case.hidden and case.bias else None,
    ]
    if case.closed:
        with torch.no_grad():
            tensors[5].zero_()
            tensors[6].fill_(-1)
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
    inputs = {name: t for name, t in zip(NAMES, tensors, strict=True) if t is not None}
    found = torch.autograd.grad(results, list(inputs.values()), grads, materialize_grads=True)
    return dict(zip(inputs, found, strict=True))
