"""Margin gates: exactly k open, no block dies by drifting, and a trained layer is kept as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.gates.margin import MarginGate
from blockgate.grid import BlockGrid
from blockgate.spec import GateSpec
from tests.helpers import assert_close, raises_blockgate

GRID = BlockGrid(16, 24, (4, 3))  # 4 x 8 blocks


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.75, 0.99])
def test_exactly_k_open_whatever_the_signs(sparsity):
    gate = MarginGate(GRID, GateSpec(sparsity=sparsity))
    nn.init.constant_(gate.bias, -50.0)
    dense = gate.dense(torch.randn(20, 24))
    assert ((dense > 0).sum(2) == gate.open_blocks).all()
    assert_close(dense.square().mean((1, 2)).sqrt(), torch.ones(20))


def test_a_block_enters_from_zero():
    gate = MarginGate(GRID, GateSpec(sparsity=0.5, key_size=None))
    x, y = torch.randn(2, 24)
    before, largest = None, 0.0
    # On the way from one input to another every gate moves by little at a time, though blocks come and go.
    for step in range(2001):
        now = gate.dense(torch.lerp(x, y, step / 2000)[None])
        if before is not None:
            largest = max(largest, (now - before).abs().max().item())
        before = now
    assert (gate.dense(x[None]) > 0).ne(gate.dense(y[None]) > 0).any()
    assert largest < 0.05


def test_the_runner_up_is_pulled_in():
    gate = MarginGate(BlockGrid(2, 4, (2, 1)), GateSpec(sparsity=0.5, key_size=None, select="global"))
    with torch.no_grad():
        gate.bias.copy_(torch.tensor([3.0, 2.0, 1.0, 0.0]))
        gate.weight.zero_()
    values, indices = gate(torch.zeros(1, 4))
    assert indices.tolist() == [[0, 1]]
    values[0, 1].backward()
    assert gate.bias.grad[2] != 0
    assert gate.bias.grad[3] == 0
    assert gate.bias.grad.sum().abs() < 1e-6


def test_a_trained_layer_is_kept_and_leaves_sparsity_0_without_a_jump():
    dense = nn.Linear(256, 128)
    layer = bg.DynamicSparseLinear.from_dense(dense, gate="margin", block_size=16, sparsity=0.0)
    x = torch.randn(50, 256)

    def moved():
        return ((layer(x) - dense(x)).norm() / dense(x).norm()).item()

    assert moved() < 0.05
    layer.sparsity = 1 / 16
    # One block of 16 in every row is closed: a quarter of the norm is what that takes by itself.
    assert moved() < 0.3


def test_options():
    assert MarginGate(GRID, GateSpec(select="global")).select == "global"
    with raises_blockgate("normalise and select: expected neither with gate='margin', got {'normalise': 'rms'}"):
        bg.DynamicSparseLinear(16, 24, gate="margin", normalise="rms")
    assert bg.DynamicSparseLinear(64, 64, block_size=8, gate="margin").spec == GateSpec(block_size=8, gate="margin")
