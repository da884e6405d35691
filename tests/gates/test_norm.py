"""Gates without training: they open the blocks of largest |x| times the norm of the weights."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.gates import make_gate
from blockgate.gates.norm import column_norms
from blockgate.grid import BlockGrid, open_blocks
from blockgate.runtime.packed import PackedBlocks
from blockgate.spec import GateSpec
from tests.helpers import assert_close, raises_blockgate


def masked_linear(x, weight, bias, height, kept):
    """Every row of blocks by hand: the columns of largest |x_j| * |W_j| stay, the others are cut out."""
    parts = []
    for rows in weight.split(height):
        scores = x.abs() * rows.norm(dim=0)
        mask = torch.zeros_like(x).scatter(1, scores.topk(kept, dim=1).indices, 1.0)
        parts.append((x * mask) @ rows.T)
    y = torch.cat(parts, 1)
    return y if bias is None else y + bias


@pytest.mark.parametrize("block_out", [24, 7, 100])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9])
def test_layer_keeps_the_columns_of_largest_norm(block_out, sparsity):
    linear = nn.Linear(30, 24)
    layer = bg.DynamicSparseLinear.from_dense(linear, gate="norm", block_size=(block_out, 1), sparsity=sparsity)
    x = torch.randn(5, 30)
    kept = open_blocks(sparsity, 30)
    assert_close(layer(x), masked_linear(x, linear.weight, linear.bias, block_out, kept))
    assert (layer.gates(x) != 0).sum(2).eq(kept).all()
    assert list(layer.gate.parameters()) == []
    assert set(layer.state_dict()) == {"weight", "bias", "gate.sparsity"}
    assert layer.gate.target_density == kept / 30


def test_wide_blocks_score_by_the_root_of_squares():
    gate = make_gate(GateSpec(gate="norm", block_size=(2, 2), sparsity=0.5), BlockGrid(2, 5, (2, 2)))
    gate.see(torch.tensor([[3.0, 0, 1, 0, 2], [4.0, 1, 0, 1, 0]]))
    x = torch.tensor([[1.0, -2, 3, 0.5, -10]])
    assert_close(gate.scores(x), torch.tensor([[29.0**0.5, 9.25**0.5, 20.0]]))
    assert gate(x)[1].tolist() == [[0, 2]]
    assert gate(x)[0].tolist() == [[1, 1]]


def test_gradients_flow_through_open_columns_only():
    layer = bg.DynamicSparseLinear(12, 8, gate="norm", block_size=(8, 1), sparsity=0.75)
    x = torch.randn(1, 12, requires_grad=True)
    layer(x).sum().backward()
    opened = layer.gates(x)[0, 0] != 0
    assert ((layer.weight.grad != 0).any(0) == opened).all()
    assert ((x.grad[0] != 0) == opened).all()


def test_norms_follow_the_weight():
    layer = bg.DynamicSparseLinear(10, 4, gate="norm", block_size=(4, 1), sparsity=0.9).eval()
    x = torch.ones(1, 10)

    def opened():
        return layer.gates(x).flatten().nonzero().item()

    with torch.no_grad():
        for column in (3, 7):
            layer.weight.zero_()[:, column] = 1.0
            layer(x)
            assert opened() == column
        layer.load_state_dict({"weight": torch.eye(10)[[5] * 4], "bias": torch.zeros(4), "gate.sparsity": 0.9})
        layer(x)
        assert opened() == 5
    optimizer = torch.optim.SGD(layer.parameters(), 1.0)
    layer.weight.grad = torch.eye(10)[[5] * 4] - torch.eye(10)[[1] * 4]
    optimizer.step()
    layer(x)
    assert opened() == 1
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_close(twin(x), layer(x))


def test_zero_and_nan_inputs():
    layer = bg.DynamicSparseLinear(6, 4, gate="norm", block_size=(4, 1), sparsity=0.5)
    x = torch.tensor([[0.0, 1, 0, 0, 0, 0], [0.0] * 6, [1.0, torch.nan, 0, 0, 0, 0]])
    y = layer(x)
    assert_close(y[1], layer.bias)
    assert y[2].isnan().all()
    assert (layer.gates(x[:2]) != 0).sum((1, 2)).tolist() == [1, 0]


@pytest.mark.parametrize(
    "options", [{"key_size": 4}, {"key_offset": 1}, {"gate_hidden": 3}, {"normalise": "rms"}, {"select": "global"}]
)
def test_options_of_networks_are_refused(options):
    with raises_blockgate("expected"):
        bg.DynamicSparseLinear(8, 8, gate="norm", block_size=(8, 1), **options)


def test_sparsify_accepts_columns_everywhere():
    model = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 3))
    dense = copy.deepcopy(model)
    report = bg.sparsify_(model, gate="norm", block_size=(64, 1), sparsity=0.25, example_input=torch.randn(2, 64))
    assert [entry.name for entry in report.converted] == ["0", "2"]
    assert report.relative_difference < 1e-5
    x = torch.randn(50, 64)
    assert 0 < (model(x) - dense(x)).norm() / dense(x).norm() < 0.3
    summary = bg.summary(model, x)
    assert summary.gate_parameters == 0
    assert summary.layers[0].gate_macs == 64


@pytest.mark.parametrize("block", [(1536, 1), (40, 1), (8, 4)])
def test_checkpoint_round_trip(tmp_path, block):
    def dense():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(32, 40), nn.ReLU(), nn.Linear(40, 32))

    model = dense()
    bg.sparsify_(model, gate="norm", block_size=block, sparsity=0.6)
    bg.save_pretrained(model, tmp_path)
    loaded = bg.load_pretrained(tmp_path, dense)
    x = torch.randn(3, 32)
    assert_close(loaded(x), model(x))


def test_other_layers_take_it_too():
    x = torch.randn(3, 2, 12)
    lstm = bg.DynamicSparseLSTM(12, 16, gate="norm", block_size=(16, 1), sparsity=0.5)
    y, _ = lstm(x)
    y.sum().backward()
    assert torch.isfinite(y).all()
    with torch.no_grad():
        assert_close(lstm.eval()(x)[0], y.detach())


def test_blocks_may_be_larger_than_the_weight():
    wide, fitting = (bg.DynamicSparseLinear(24, 16, block_size=(8, n), gate="norm") for n in (1 << 40, 24))
    fitting.load_state_dict(wide.state_dict())
    x = torch.randn(3, 24)
    torch.testing.assert_close(wide(x), fitting(x), rtol=0, atol=0)


def test_another_weight_in_the_same_memory_is_seen():
    """A weight that takes the place of one that is gone often lies where that one lay."""
    layer = bg.DynamicSparseLinear(8, 8, gate="norm", block_size=(4, 1), sparsity=0.5).eval()
    x = torch.randn(2, 8)
    with torch.no_grad():
        for _ in range(300):
            del layer.weight
            layer.weight = nn.Parameter(torch.randn(8, 8))
            layer.gates(x)
            assert_close(layer.gate.norms, column_norms(layer.weight, layer.grid))


def test_blocks_that_are_loaded_have_their_own_norms(monkeypatch):
    """The weight that blocks stand for is made for a moment, often where that of other blocks was made before."""
    memory, right = torch.zeros(8, 8).numpy(), PackedBlocks.weight

    def weight(self):
        memory[:] = right(self).numpy()
        return torch.from_numpy(memory)

    monkeypatch.setattr(PackedBlocks, "weight", weight)
    one, other = (bg.DynamicSparseLinear(8, 8, gate="norm", block_size=(4, 4), sparsity=0.5).eval() for _ in range(2))
    twin = bg.pack(one, "float32")
    with torch.no_grad():
        for layer in (one, other, one):
            twin.load_state_dict(bg.pack(layer, "float32").state_dict())
            torch.testing.assert_close(twin.gate.norms, column_norms(layer.weight, layer.grid))
