"""Sparse and packed inference of pruned and static models computes what the masked dense model computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from blockgate.convert import pack
from blockgate.lab.baselines import (
    MagnitudePruner,
    StaticBlockLinear,
    StaticBlockLSTM,
    StaticBlockQRNN,
    prunable_weights,
    to_block_inference,
    to_sparse_inference,
)
from blockgate.lab.baselines.inference import SparseLinear, SparseLSTM
from blockgate.layers import QRNN, weight_drop_
from blockgate.runtime.packed import PackedDynamicSparseLinear
from blockgate.runtime.packed_recurrent import PackedLSTM
from tests.helpers import TOLERANCE, assert_close, raises_blockgate

DENSE = {
    "linear": lambda: nn.Linear(24, 20),
    "linear without bias": lambda: nn.Linear(24, 20, bias=False),
    "lstm": lambda: nn.LSTM(24, 16, 2),
    "lstm without bias": lambda: nn.LSTM(24, 16, bias=False, batch_first=True),
    "qrnn": lambda: QRNN(24, 16, 2),
}
STATIC = {
    "linear": lambda: StaticBlockLinear(24, 20, block_size=8, sparsity=0.5),
    "lstm": lambda: StaticBlockLSTM(24, 16, 2, block_size=8, sparsity=0.5),
    "qrnn": lambda: StaticBlockQRNN(24, 16, 2, block_size=8, sparsity=0.5),
}


def pruned(model, block_size=None, sparsity=0.75):
    MagnitudePruner(prunable_weights(model), sparsity, 1, 1, block_size=block_size).step()
    return model.eval()


def assert_same(fast, model, x):
    with torch.no_grad():
        found, expected = fast(x), model(x)
    if isinstance(expected, tuple):
        if isinstance(expected[1][0], torch.Tensor):
            assert_close(found[1][1], expected[1][1], "c")
        found, expected = found[0], expected[0]
    assert_close(found, expected)


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("shape", [(1, 1, 24), (5, 1, 24), (5, 3, 24)])
def test_csr_equals_the_pruned_model(kind, shape):
    model = pruned(DENSE[kind]())
    fast = to_sparse_inference(model)
    assert any(isinstance(m, (SparseLinear, SparseLSTM)) for m in fast.modules())
    assert_same(fast, model, torch.randn(shape))


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("shape", [(1, 1, 24), (5, 3, 24)])
def test_blocks_equal_the_block_pruned_model(kind, shape):
    model = pruned(DENSE[kind](), block_size=8)
    assert_same(to_block_inference(model, block_size=8), model, torch.randn(shape))


@pytest.mark.parametrize("kind", STATIC)
@pytest.mark.parametrize("shape", [(1, 1, 24), (5, 3, 24)])
def test_blocks_equal_the_static_model(kind, shape):
    model = STATIC[kind]().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight[weight == 0] = 3.0  # closed blocks are not looked at
    assert_same(to_block_inference(model, block_size=3), model, torch.randn(shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_blocks_in_smaller_types(dtype):
    model = pruned(nn.LSTM(24, 16), block_size=8)
    x = torch.randn(5, 3, 24)
    with torch.no_grad():
        found, expected = to_block_inference(model, dtype, block_size=8)(x)[0], model(x)[0]
    rtol, atol = TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    assert not torch.equal(found, expected)


def test_only_blocks_with_something_in_them_open():
    model = pruned(nn.LSTM(32, 16), block_size=8)
    fast = to_block_inference(model, block_size=8)
    assert isinstance(fast, PackedLSTM)
    for name, blocks in (("ih", 8), ("hh", 4)):
        matrix = fast.get_submodule(f"{name}_l0")
        gates = matrix.gates(torch.randn(6, matrix.in_features))
        assert gates.unique().tolist() == [0.0, 1.0]
        assert gates.sum(dim=(-1, -2)).tolist() == [blocks] * 6


def test_the_model_is_left_alone_and_dense_layers_stay_dense():
    model = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 8)).train()
    MagnitudePruner({"w": model[0].weight}, 0.75, 1, 1, block_size=8).step()
    before = copy.deepcopy(model.state_dict())
    for fast in (to_sparse_inference(model), to_block_inference(model, block_size=8)):
        assert not fast.training
        assert_same(fast, model, torch.randn(3, 24))
    assert type(to_sparse_inference(model)[2]) is nn.Linear
    assert isinstance(to_block_inference(model, block_size=8)[0], PackedDynamicSparseLinear)
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_layers_trained_with_dropped_weights_are_replaced_too():
    model = pruned(weight_drop_(nn.LSTM(24, 16), "weight_hh_l0", 0.5))
    fast = to_sparse_inference(model)
    assert isinstance(fast, SparseLSTM)
    assert_same(fast, model, torch.randn(5, 3, 24))


def test_what_is_not_pruned_can_be_packed():
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10)).eval()
    with torch.no_grad():
        model[0].weight[torch.rand(30, 20) < 0.5] = 0
        fast = pack(to_sparse_inference(model))
        assert [type(layer).__name__ for layer in fast] == ["SparseLinear", "Tanh", "PackedLinear"]
        assert not fast[0].training
        assert_close(fast(torch.eye(20)), model(torch.eye(20)))


def test_models_without_zeros_are_refused():
    with raises_blockgate("to_sparse_inference: expected a model with pruned or static layers"):
        to_sparse_inference(nn.LSTM(4, 4))
    with raises_blockgate("to_block_inference: expected a model with pruned or static layers"):
        to_block_inference(pruned(nn.Linear(64, 64)), block_size=8)
