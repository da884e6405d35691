"""The layer computes the method: against the dense-mask formula, in degenerate cases, and on bad input."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import blockgate as bg
from tests.helpers import assert_close, dense_mask_linear, raises_blockgate

KINDS = [
    {"gate": "topk"},
    {"gate": "topk", "normalise": "rms", "select": "per_row"},
    {"gate": "topk", "normalise": "none", "gate_hidden": 3},
    {"gate": "softmax_sum"},
    {"gate": "sigmoid", "sparsity": 0},
]


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
    st.floats(0, 0.99),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(["mean", "rms"]),
    st.sampled_from(["global", "per_row"]),
    st.booleans(),
)
def test_layer_equals_the_dense_mask_formula(m, n, block, sparsity, dtype, leading, normalise, select, bias):
    layer = bg.DynamicSparseLinear(
        n, m, bias, block_size=block, sparsity=sparsity, normalise=normalise, select=select, dtype=dtype
    )
    x = torch.randn(*leading, n, dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype
    assert y.shape == (*leading, m)
    gates = layer.gates(x)
    assert gates.shape == (*leading, layer.grid.out_blocks, layer.grid.in_blocks)
    wide = torch.promote_types(dtype, torch.float32)
    want = dense_mask_linear(
        x.reshape(-1, n).to(wide),
        layer.weight.to(wide),
        None if layer.bias is None else layer.bias.to(wide),
        gates.flatten(0, -3) if leading else gates[None],
        layer.grid,
    )
    assert_close(y.reshape(-1, m), want)


@pytest.mark.parametrize("bias", [True, False])
def test_with_equal_gates_it_is_nn_linear(bias):
    dense = nn.Linear(20, 14, bias=bias)
    layer = bg.DynamicSparseLinear.from_dense(dense, block_size=4, sparsity=0)
    nn.init.zeros_(layer.gate.weight)
    nn.init.ones_(layer.gate.bias)
    x = torch.randn(7, 20)
    assert_close(layer(x), dense(x))


def test_one_block_is_nn_linear_whatever_the_sparsity():
    dense = nn.Linear(5, 3)
    layer = bg.DynamicSparseLinear.from_dense(dense, block_size=128, sparsity=0.99)
    x = torch.randn(4, 5)
    assert_close(layer(x), dense(x))


def test_element_wise_gating_works():
    layer = bg.DynamicSparseLinear(4, 3, block_size=1, sparsity=0.5, key_size=None)
    x = torch.randn(2, 4)
    assert_close(layer(x), ((layer.gates(x) * layer.weight) @ x[:, :, None])[..., 0] + layer.bias)


def test_no_positive_score_leaves_the_bias():
    layer = bg.DynamicSparseLinear(6, 4, gate="topk", block_size=2)
    nn.init.constant_(layer.gate.bias, -100.0)
    x = torch.randn(3, 6, requires_grad=True)
    y = layer(x)
    torch.testing.assert_close(y, layer.bias.expand(3, 4), rtol=0, atol=0)
    y.sum().backward()
    for parameter in (x, layer.weight, layer.gate.weight, layer.gate.bias):
        assert parameter.grad.count_nonzero() == 0


@pytest.mark.parametrize("options", KINDS, ids=lambda o: "-".join(map(str, o.values())))
def test_gradcheck_through_gate_and_product(options):
    layer = bg.DynamicSparseLinear(7, 5, block_size=(2, 3), dtype=torch.float64, **{"sparsity": 0.5, **options})
    parameters = dict(layer.named_parameters())

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(parameters, values, strict=True)), x)

    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (x, *parameters.values()))


def test_training_lowers_the_loss():
    layer = bg.DynamicSparseLinear(16, 8, block_size=4, sparsity=0.5)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    x, target = torch.randn(64, 16), torch.randn(64, 8)
    losses = []
    for _ in range(60):
        loss = nn.functional.mse_loss(layer(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.75, 0.95])
def test_open_gates_follow_the_sparsity(sparsity):
    for gate, groups in (("topk", 4), ("eq1", 1)):
        layer = bg.DynamicSparseLinear(32, 32, block_size=8, sparsity=0.5, gate=gate)
        nn.init.constant_(layer.gate.bias, 5.0)
        layer.sparsity = sparsity
        opened = (layer.gates(torch.randn(6, 32)) != 0).sum((-1, -2))
        assert (opened == groups * bg.grid.open_blocks(sparsity, 16 // groups)).all()


def test_eq1_is_one_word_for_the_gate_of_the_paper():
    made = [bg.DynamicSparseLinear(32, 32, block_size=8, gate=gate).gate for gate in ("topk", "eq1")]
    assert [(gate.kind, gate.normalise, gate.select) for gate in made] == [
        ("topk", "rms", "per_row"),
        ("topk", "mean", "global"),
    ]


def test_from_dense_starts_near_the_trained_layer_and_shares_it():
    dense = nn.Linear(256, 192).eval()
    layer = bg.DynamicSparseLinear.from_dense(dense, block_size=32, sparsity=0)
    assert layer.weight is dense.weight
    assert layer.bias is dense.bias
    assert not layer.training
    x = torch.randn(100, 256)
    difference = (layer(x) - dense(x)).norm() / dense(x).norm()
    assert 0 < difference < 0.05


def test_from_dense_takes_dtype_and_options():
    layer = bg.DynamicSparseLinear.from_dense(nn.Linear(8, 8, dtype=torch.float64), block_size=2, gate="softmax_sum")
    assert layer.gate.weight.dtype == torch.float64
    assert layer.gate.kind == "softmax_sum"
    with raises_blockgate("from_dense: expected an nn.Linear with a weight of its own, got 'Conv2d'"):
        bg.DynamicSparseLinear.from_dense(nn.Conv2d(1, 1, 1))
    with raises_blockgate("from_dense: expected an nn.Linear with a weight of its own"):
        bg.DynamicSparseLinear.from_dense(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    with raises_blockgate("bias: expected the dense layer's, got True"):
        bg.DynamicSparseLinear.from_dense(nn.Linear(4, 4), bias=True)


def test_reset_parameters_starts_afresh():
    layer = bg.DynamicSparseLinear(16, 16, block_size=4)
    before = {name: p.clone() for name, p in layer.named_parameters()}
    torch.manual_seed(1)
    layer.reset_parameters()
    assert not torch.equal(layer.weight, before["weight"])
    assert not torch.equal(layer.gate.weight, before["gate.weight"])
    assert layer.gate.bias.count_nonzero() == 0
    assert layer.weight.abs().max() <= 0.25


def test_repr_tells_what_matters():
    text = repr(bg.DynamicSparseLinear(300, 200, block_size=(64, 32), sparsity=0.9, normalise="rms"))
    for part in ("in_features=300", "out_features=200", "block_size=(64, 32)", "blocks=4x10", "sparsity=0.9", "rms"):
        assert part in text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("position", [0, 9])  # in the key of the gate, and outside of it
@pytest.mark.parametrize("gate", ["topk", "softmax_sum"])
def test_bad_numbers_in_a_row_reach_all_its_outputs_and_no_other(value, position, gate):
    layer = bg.DynamicSparseLinear(10, 8, block_size=2, key_size=5, sparsity=0.5, gate=gate).eval()
    reference = bg.DynamicSparseLinear(10, 8, block_size=2, key_size=5, sparsity=0.5, gate=gate, backend="reference")
    x = torch.randn(3, 10)
    bad = x.clone()
    bad[1, position] = value
    for way in (layer, bg.pack(layer), reference.eval()):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                y, clean = way(bad), way(x)
                assert y[1].isnan().all()
                assert_close(y[[0, 2]], clean[[0, 2]])
                assert_close(way(bad[2]), clean[2])
                assert way(bad[1]).isnan().all()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(2, 5), "input: expected shape (..., 6), got (2, 5)"),
        (torch.tensor(1.0), "input: expected shape (..., 6), got ()"),
        (
            torch.ones(2, 6, dtype=torch.float64),
            "expected torch.float32, as the layer's weight, got torch.float64",
        ),
        (
            torch.ones(2, 6, dtype=torch.int64),
            "input: expected a dense floating tensor, got 'torch.strided of torch.int64'",
        ),
        (
            torch.ones(2, 6).to_sparse(),
            "input: expected a dense floating tensor, got 'torch.sparse_coo of torch.float32'",
        ),
        ([1.0] * 6, "input: expected a dense floating tensor, got 'list'"),
        (None, "input: expected a dense floating tensor, got 'NoneType'"),
        (torch.ones(2, 6, device="meta"), "input: expected a tensor on cpu, as the layer's weight, got 'meta'"),
    ],
)
def test_bad_inputs_are_refused(x, message):
    layer = bg.DynamicSparseLinear(6, 4, block_size=2)
    for call in (layer, layer.gates):
        with raises_blockgate(message, ValueError):
            call(x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_features": 0}, "in_features: expected a positive int, got 0"),
        ({"block_size": -2}, "block_size (out): expected a positive int, got -2"),
        ({"sparsity": 1}, "sparsity: expected a number in [0, 1), got 1"),
        ({"backend": "cuda"}, "backend: expected one of"),
    ],
)
def test_bad_options_are_refused(arguments, message):
    with raises_blockgate(message):
        bg.DynamicSparseLinear(**{"in_features": 6, "out_features": 4, **arguments})


def test_a_refused_sparsity_changes_nothing():
    layer = bg.DynamicSparseLinear(6, 4, block_size=2, sparsity=0.5)
    with raises_blockgate("sparsity: expected a number in [0, 1), got 1.0"):
        layer.sparsity = 1.0
    assert layer.sparsity == 0.5
