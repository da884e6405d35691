"""Paired MLPs on packed blocks: close to what they were packed from, one native call for a few rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.formats import get_format
from blockgate.ops.packed_linear import run_prepared_mlp
from blockgate.runtime.paired import ACTIVATIONS
from tests.helpers import raises_blockgate
from tests.model_zoo import run
from tests.paired_zoo import BLOCK, EACH, made


@EACH
@pytest.mark.parametrize("stored_as", ["float32", "bfloat16", "float16", "int8", "int8a8", "int4"])
def test_packed_models_are_close_and_load_unpacked_weights(name, stored_as):
    model, example, names = made(name)
    bg.sparsify_(model, paired=BLOCK, sparsity=0.5)
    packed = bg.pack(model, stored_as)
    with torch.no_grad():
        expected, result = run(model, example), run(packed, example)
        limits = {"float32": 1e-4, "bfloat16": 0.03, "float16": 0.004, "int8": 0.03, "int8a8": 0.06, "int4": 0.35}
        assert (result - expected).norm() <= limits[stored_as] * expected.norm()
        other, _, _ = made(name, seed=1)
        bg.sparsify_(other, paired=BLOCK, sparsity=0.25)
        packed.load_state_dict(other.state_dict())
        assert torch.equal(run(packed, example), run(bg.pack(other, stored_as), example))
    weights = sum(t.numel() * t.element_size() for t in packed.state_dict().values())
    assert stored_as == "float32" or weights < sum(t.numel() * 4 for t in model.state_dict().values())
    assert {row.kind for row in bg.explain(packed, example).layers} <= {
        "PackedPairedMLP",
        "PackedDynamicSparseLinear",
        "PackedLinear",
    }
    assert sum(row.kind == "PackedPairedMLP" for row in bg.explain(packed, example).layers) == len(names)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu"])
@pytest.mark.parametrize("glu", [False, True])
@pytest.mark.parametrize("stored_as", ["float32", "bfloat16", "float16", "int8", "int8a8", "int4"])
def test_one_native_call_gives_what_the_ops_give(activation, glu, stored_as):
    torch.manual_seed(0)
    mlp = bg.DynamicSparseMLP(70, 150, 45, activation=activation, glu=glu, sparsity=0.5, gate_hidden=None)
    packed = bg.pack(mlp.eval(), get_format(stored_as))
    for rows in (1, 2, 7, 65, 1024, 1025, 0):
        x = torch.randn(rows, 70)
        with torch.no_grad():
            y, expected = packed(x), packed._product(x)
        assert packed.plan(x).path == ("fused native" if rows <= 1024 else "separate ops")
        # Different activations round differently; integer formats round hidden channels once more.
        torch.testing.assert_close(y, expected, rtol=2e-4, atol=2e-4 if stored_as != "int8a8" else 5e-3)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu"])
@pytest.mark.parametrize("hidden", [64, 70])
def test_native_activations_are_exact_over_their_range(activation, hidden):
    mlp = bg.DynamicSparseMLP(1, hidden, hidden, bias=False, activation=activation, sparsity=0.0).eval()
    with torch.no_grad():
        mlp.up.weight.copy_(torch.linspace(-1, 1, hidden)[:, None])
        mlp.down.weight.copy_(torch.eye(hidden))
        packed = bg.pack(mlp)
        x = torch.tensor([[1.0], [5.0], [14.0], [100.0], [1e30]])
        y, gates = packed(x), packed.gates(x).repeat_interleave(32, 1)[:, :hidden]
        hidden_channels = (x.double() * mlp.up.weight.T.double()).float().double()
        expected = gates.double() * ACTIVATIONS[activation](hidden_channels)
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_packed_mlp_follows_changes_and_bad_input():
    mlp = bg.DynamicSparseMLP(16, 64, activation=nn.Tanh()).eval()
    assert bg.pack(mlp).plan(torch.randn(1, 16)).path == "separate ops"
    packed = bg.pack(bg.DynamicSparseMLP(16, 64, sparsity=0.5).eval(), "int8")
    x = torch.randn(2, 16)
    with torch.no_grad():
        before = packed(x)
        packed.sparsity = 0.0
        assert (packed.gates(x) != 0).all()
        after = packed(x)
        assert not torch.allclose(before, after)
        packed.load_state_dict(bg.pack(bg.DynamicSparseMLP(16, 64, sparsity=0.5), "int8").state_dict())
        assert not torch.allclose(packed(x), before)
        assert packed(torch.full((1, 16), torch.nan)).isnan().all()
    with raises_blockgate("input: expected shape (..., 16)"):
        packed(torch.randn(3, 15))


@pytest.mark.parametrize("stored_as", ["float32", "int8", "int8a8", "int4"])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_closed_channels_do_not_even_decide_how_inputs_are_rounded(stored_as, rows):
    torch.manual_seed(0)
    options = {"gate": "topk", "normalise": "none", "block_size": 8, "sparsity": 0.5}
    mlp = bg.DynamicSparseMLP(16, 64, activation="silu", glu=True, **options).eval()
    with torch.no_grad():
        # The first half opens, whatever comes in.
        mlp.gate.weight.zero_()
        mlp.gate.bias.copy_(torch.tensor([1.0] * 4 + [-1.0] * 4))
        x = torch.randn(rows, 16)
        before = bg.pack(mlp, stored_as)(x)
        mlp.up.bias[32:] += 1e6
        mlp.gate_proj.bias[32:] += 1e6
        assert torch.equal(bg.pack(mlp, stored_as)(x), before)
        mlp.gate.bias.fill_(-1.0)
        assert torch.equal(bg.pack(mlp, stored_as)(x), mlp.down.bias.expand(rows, 16))


def test_a_block_far_wider_than_the_mlp_takes_no_memory():
    mlp = bg.DynamicSparseMLP(8, 12, block_size=1 << 40, sparsity=0.0).eval()
    x = torch.randn(31, 8)
    with torch.no_grad():
        torch.testing.assert_close(bg.pack(mlp, "float32")(x), mlp(x))


def test_native_code_refuses_matrices_that_do_not_belong_together():
    packed = bg.pack(bg.DynamicSparseMLP(16, 64).eval())
    other = bg.pack(bg.DynamicSparseMLP(16, 96).eval())
    x = torch.randn(1, 16)
    up, down = (prepared.handle for prepared in packed._prepare())
    with pytest.raises(RuntimeError, match="up: expected a gate and one column of blocks"):
        run_prepared_mlp(x, down, down, [], 1, "gelu")
    with pytest.raises(RuntimeError, match="down: expected one row of blocks of 32 out of 64 inputs"):
        run_prepared_mlp(x, up, other._prepare()[1].handle, [], 1, "gelu")
    with pytest.raises(RuntimeError, match="gate_proj: expected the grid of up"):
        run_prepared_mlp(x, up, down, [down], 1, "gelu")
    with pytest.raises(RuntimeError, match="activation: expected gelu, gelu_tanh, relu or silu, got tanh"):
        run_prepared_mlp(x, up, down, [], 1, "tanh")
