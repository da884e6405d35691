"""The oracle opens the blocks that contribute most, and is dense where all are open."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from blockgate.grid import BlockGrid
from blockgate.lab.baselines.oracle import OracleGate, contributions, recovered
from blockgate.layers import DynamicSparseLinear, DynamicSparseLSTM, DynamicSparseQRNN
from blockgate.spec import GateSpec
from tests.helpers import assert_close, raises_blockgate

ORACLE = GateSpec(gate="oracle", block_size=(4, 3), sparsity=0.5)


@pytest.mark.parametrize("shape", [(8, 9), (13, 10)])
def test_contributions_are_the_norms_of_the_products_of_blocks(shape):
    grid = BlockGrid(*shape, (4, 3))
    weight, x = torch.randn(shape, dtype=torch.float64), torch.randn(5, shape[1], dtype=torch.float64)
    found = contributions(x, weight, grid).view(5, grid.out_blocks, grid.in_blocks)
    for r in range(grid.out_blocks):
        for c in range(grid.in_blocks):
            product = x[:, 3 * c : 3 * c + 3] @ weight[4 * r : 4 * r + 4, 3 * c : 3 * c + 3].T
            assert_close(found[:, r, c], product.square().sum(1))


def test_it_opens_the_largest_of_every_row_with_the_value_1():
    layer = DynamicSparseLinear(24, 16, spec=ORACLE)
    x = torch.randn(6, 24)
    scores = contributions(x, layer.weight, layer.grid).view(6, 4, 8)
    values, indices = layer.gate.decide(x, layer.weight)
    expected = scores.topk(4, dim=-1).indices.sort(-1).values + 8 * torch.arange(4)[:, None]
    assert torch.equal(indices, expected.flatten(1))
    assert (values == 1).all()
    kept = torch.zeros(6, 32).scatter(1, indices, 1.0).view(6, 4, 8)
    mask = kept.repeat_interleave(4, 1).repeat_interleave(3, 2)
    assert_close(layer(x), torch.einsum("nmk,nk->nm", mask * layer.weight, x) + layer.bias)


@pytest.mark.parametrize("make", [DynamicSparseLSTM, DynamicSparseQRNN])
def test_recurrent_layers_train_with_it_step_by_step(make):
    layer = make(24, 16, spec=ORACLE)
    y, _ = layer(torch.randn(5, 2, 24))
    y.square().sum().backward()
    assert all(
        p.grad is None or p.numel() == 0 for m in layer.modules() if isinstance(m, OracleGate) for p in m.parameters()
    )
    assert all(w.grad is not None and w.grad.any() for w in layer.parameters() if w.dim() == 2 and w.numel())


def test_with_all_blocks_open_it_is_dense():
    layer = DynamicSparseLinear(24, 16, spec=ORACLE, sparsity=0.0)
    x = torch.randn(6, 24)
    assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_without_its_layer_it_knows_nothing():
    gate = OracleGate(BlockGrid(16, 24, (4, 3)), ORACLE)
    with raises_blockgate("the weight of its layer"):
        gate(torch.randn(2, 24))


@pytest.mark.parametrize(("gate", "share"), [(130.0, 0.0), (125.0, 0.5), (120.0, 1.0), (135.0, -0.5), (115.0, 1.5)])
def test_the_share_that_a_gate_recovers(gate, share):
    assert recovered(gate, static=130.0, oracle=120.0) == share


def test_where_the_oracle_is_no_better_there_is_nothing_to_recover():
    assert recovered(125.0, static=120.0, oracle=120.0) is None
