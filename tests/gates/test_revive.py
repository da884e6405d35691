"""Blocks that no row opens come back, and no others move."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.gates import BlockReviver
from tests.helpers import raises_blockgate


def starved(gate, make=bg.DynamicSparseLinear):
    """A layer in which the last block of every row is out of reach."""
    layer = make(24, 16, block_size=(4, 3), sparsity=0.5, gate=gate)
    for module in layer.modules():
        if hasattr(module, "target_sparsity"):
            with torch.no_grad():
                module.bias.view(module.grid.out_blocks, -1)[:, -1] = -50.0
    return layer


@pytest.mark.parametrize("gate", ["margin", "topk"])
def test_only_blocks_that_no_row_opens_are_raised(gate):
    layer = starved(gate)
    layer(torch.randn(200, 24)).square().sum().backward()
    before = layer.gate.bias.detach().clone()
    assert BlockReviver(layer, patience=0).step(0.25) == 4
    moved = (layer.gate.bias - before).view(4, 8)
    assert torch.equal(moved[:, -1], torch.full((4,), 0.25))
    assert not moved[:, :-1].any()


def test_they_open_again_in_time():
    torch.manual_seed(0)
    layer = starved("margin")
    target = nn.Linear(24, 16)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    reviver = BlockReviver(layer, patience=3)
    opened = torch.zeros(layer.grid.num_blocks, dtype=torch.bool)
    for update in range(300):
        x = torch.randn(200, 24)
        nn.functional.mse_loss(layer(x), target(x).detach()).backward()
        optimizer.step()
        reviver.step(0.5)
        optimizer.zero_grad()
        if update >= 200:
            with torch.no_grad():
                opened |= (layer.gate.dense(x) != 0).any(0).flatten()
    assert opened.all()


def test_the_recurrent_gates_are_reached_too():
    layer = starved("margin", bg.DynamicSparseLSTM)
    layer(torch.randn(40, 8, 24))[0].square().sum().backward()
    assert (
        BlockReviver(layer, patience=0).step(0.5) >= layer.gate_ih_l0.grid.out_blocks + layer.gate_hh_l0.grid.out_blocks
    )


def test_without_gradients_or_gates_nothing_happens():
    layer = starved("margin")
    before = layer.gate.bias.detach().clone()
    assert BlockReviver(layer, patience=0).step(1.0) == 0
    assert BlockReviver(nn.Linear(3, 3), patience=0).step(1.0) == 0
    assert torch.equal(layer.gate.bias, before)


@pytest.mark.parametrize("step", [-1.0, float("nan"), float("inf"), "much"])
def test_a_step_that_makes_no_sense_is_refused(step):
    with raises_blockgate("amount"):
        BlockReviver(starved("margin")).step(step)


def test_a_block_that_rests_for_a_while_is_left_alone():
    layer = starved("margin")
    keys = set(layer.state_dict())
    raised = []
    reviver = BlockReviver(layer, patience=2)
    for call in range(6):
        layer.zero_grad()
        layer(torch.randn(200, 24)).square().sum().backward()
        if call == 2:  # a row opens them once: the count starts again
            layer.gate.bias.grad.fill_(1.0)
        raised.append(reviver.step(0.25))
    assert raised == [0, 0, 0, 0, 0, 4]
    assert set(layer.state_dict()) == keys


@pytest.mark.parametrize("patience", [-1, 0.5, "long"])
def test_a_patience_that_makes_no_sense_is_refused(patience):
    with raises_blockgate("patience"):
        BlockReviver(starved("margin"), patience=patience)


def test_counts_survive_a_restart():
    layer = starved("margin")
    layer(torch.randn(200, 24)).square().sum().backward()
    first = BlockReviver(layer, patience=1)
    assert first.step(0.25) == 0
    second = BlockReviver(layer, patience=1)
    second.load_state_dict(first.state_dict())
    assert second.step(0.25) == 4
    other = BlockReviver(bg.DynamicSparseLinear(24, 16, block_size=8))
    with raises_blockgate("counts of unseen blocks"):
        other.load_state_dict(first.state_dict())
