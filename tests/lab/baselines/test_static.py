"""Layers with a fixed pattern: equal to dense layers with zeros, closed for good, and known to models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from blockgate.lab.baselines import StaticBlockLinear, StaticBlockLSTM, StaticBlockQRNN
from blockgate.lab.baselines.patterns import even_pattern, expand_blocks
from blockgate.layers import QRNN, weight_drop_
from tests.helpers import assert_close

LAYERS = {
    "linear": (lambda: StaticBlockLinear(12, 8, block_size=4, sparsity=0.5), lambda: nn.Linear(12, 8)),
    "lstm": (lambda: StaticBlockLSTM(12, 8, 2, block_size=4, sparsity=0.5), lambda: nn.LSTM(12, 8, 2)),
    "qrnn": (lambda: StaticBlockQRNN(12, 8, 2, block_size=4, sparsity=0.5), lambda: QRNN(12, 8, 2)),
}


def output(layer, x):
    y = layer(x)
    return y[0] if isinstance(y, tuple) else y


def matrices(layer):
    return {name: weight for name, weight in layer.named_parameters() if weight.dim() == 2}


@pytest.mark.parametrize("kind", LAYERS)
def test_half_of_every_matrix_is_closed_and_stays_so(kind):
    layer = LAYERS[kind][0]()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1, weight_decay=0.1)
    before = {name: weight.detach().clone() for name, weight in matrices(layer).items()}
    for _ in range(3):
        optimizer.zero_grad()
        output(layer, torch.randn(5, 3, 12)).square().sum().backward()
        optimizer.step()
    for name, weight in matrices(layer).items():
        assert (weight == 0).double().mean() == 0.5
        assert torch.equal(weight == 0, before[name] == 0)
        assert not torch.equal(weight, before[name])


@pytest.mark.parametrize("kind", LAYERS)
def test_it_computes_as_a_dense_layer_with_zeros(kind):
    layer, dense = (make() for make in LAYERS[kind])
    dense.load_state_dict({name: value for name, value in layer.state_dict().items() if "pattern" not in name})
    x = torch.randn(5, 3, 12)
    assert_close(output(layer, x), output(dense, x))


@pytest.mark.parametrize("kind", LAYERS)
def test_values_in_closed_blocks_count_for_nothing(kind):
    layer = LAYERS[kind][0]()
    x = torch.randn(5, 3, 12)
    expected = output(layer, x)
    with torch.no_grad():
        for weight in matrices(layer).values():
            weight[weight == 0] = 7.0
    assert torch.equal(output(layer, x), expected)
    assert torch.equal(output(copy.deepcopy(layer), x), expected)


def test_the_pattern_is_the_even_one():
    layer = StaticBlockLSTM(10, 6, block_size=4, sparsity=0.5)
    grid = layer.grids["weight_ih_l0"]
    assert torch.equal(layer.weight_ih_l0 != 0, expand_blocks(even_pattern(grid, 0.5), grid))


def test_weights_can_be_dropped_too():
    layer = weight_drop_(StaticBlockLSTM(12, 8, block_size=4, sparsity=0.5), "weight_hh_l0", 0.5)
    x = torch.randn(5, 3, 12)
    layer(x)[0].sum().backward()
    assert not torch.equal(layer(x)[0], layer(x)[0])
    assert not layer.weight_hh_l0.grad[layer.weight_hh_l0 == 0].any()
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])
