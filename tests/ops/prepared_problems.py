"""Products of stacks of recurrent layers: prepared for native calls, and through the ops of training."""

from __future__ import annotations

import torch
from torch import nn

from blockgate.formats import FORMATS
from blockgate.grid import BlockGrid
from blockgate.ops import gate_scores, gated_linear, topk_gates
from blockgate.ops import packed_linear as packed
from tests.ops.recurrent_problems import LSTM


class Product:
    """One product of the stack: its parameters, its handle, and itself through the ops of training."""

    def __init__(self, inputs, outputs, block, name, *, hidden=None, per_row=False, normalise="mean", bias=True):
        self.grid, self.normalise, self.format = BlockGrid(outputs, inputs, block), normalise, FORMATS[name]
        self.groups = self.grid.out_blocks if per_row else 1
        self.open_blocks = max(1, round(self.grid.num_blocks / self.groups / 2))
        self.key_offset, self.key_size = inputs // 3, inputs - inputs // 3
        self.stored = packed.pack_blocks(torch.randn(outputs, inputs) * inputs**-0.5, block, name)
        self.weight = packed.unpack_blocks(*self.stored, (outputs, inputs, *block), name)
        self.bias = torch.randn(outputs) if bias else None
        self.gate = [torch.randn(self.grid.num_blocks, hidden or self.key_size), torch.randn(self.grid.num_blocks)]
        self.hidden = [torch.randn(hidden, self.key_size), torch.randn(hidden)] if hidden else [None, None]
        packed_gate = [
            None if w is None else packed.pack_blocks(w, w.shape, "float32")[0] for w in (self.gate[0], self.hidden[0])
        ]
        self.handle = packed.prepare_dynamic_linear(
            *self.stored, self.bias, (outputs, inputs, *block), name, packed_gate[0], self.gate[1], packed_gate[1],
            self.hidden[1], (self.key_offset, self.key_size), self.groups, normalise,
        )  # fmt: skip

    def __call__(self, rows):
        key = rows[:, self.key_offset : self.key_offset + self.key_size]
        if self.hidden[0] is not None:
            key = torch.relu(gate_scores(key, *self.hidden))
        scores = gate_scores(key, *self.gate)
        gates, indices = topk_gates(scores, self.open_blocks, groups=self.groups, normalise=self.normalise)
        rows = self.format.round_inputs(rows, self.grid)
        return gated_linear(rows, self.weight, self.bias, gates, indices, self.grid.block)

    def recurrence(self, cell, projected, state):
        return cell.run(
            projected, *state, self.weight, self.bias, *self.gate, *self.hidden, key_offset=self.key_offset,
            key_size=self.key_size, block=self.grid.block, open_blocks=self.open_blocks, groups=self.groups,
            normalise=self.normalise,
        )  # fmt: skip


class DenseProduct:
    """The same with every block open and no gate."""

    open_blocks = 0

    def __init__(self, inputs, outputs, block, name):
        self.stored = packed.pack_blocks(torch.randn(outputs, inputs) * inputs**-0.5, block, name)
        self.weight = packed.unpack_blocks(*self.stored, (outputs, inputs, *block), name)
        self.bias, self.grid, self.format = torch.randn(outputs), BlockGrid(outputs, inputs, block), FORMATS[name]
        self.handle = packed.prepare_packed_linear(*self.stored, self.bias, (outputs, inputs, *block), name)

    def __call__(self, rows):
        return nn.functional.linear(self.format.round_inputs(rows, self.grid), self.weight, self.bias)


def make_stack(inputs, size, block, options, name, layers=2, cell=LSTM):
    options = dict(options)
    make = DenseProduct if options.pop("dense", False) else Product
    return [
        make(inputs if i == 0 else size, cell.gates * size, block, name, **options if make is Product else {})
        for i in range(2 * layers)
    ]
