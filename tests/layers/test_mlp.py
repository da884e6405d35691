"""The paired MLP against its formula, written out for one row at a time."""

from __future__ import annotations

import copy
import io
import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import blockgate as bg
from blockgate.integrations.onnx import exportable
from blockgate.runtime.paired import name_of_activation
from tests.helpers import assert_close, gradients, raises_blockgate

ACTIVATIONS = {
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: x.clamp(min=0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


def formula(mlp, x, gates, activation):
    """One row at a time, one hidden block at a time; closed blocks are not looked at."""
    width, hidden = mlp.grid.block[0], mlp.hidden_features
    rows = []
    for row, opened in zip(x.reshape(-1, x.shape[-1]), gates.reshape(-1, gates.shape[-1]), strict=True):
        y = torch.zeros(mlp.out_features, dtype=x.dtype)
        for block in range(mlp.grid.num_blocks):
            part = slice(block * width, min(hidden, (block + 1) * width))
            if opened[block] == 0:
                continue
            up = mlp.up.weight[part] @ row + (0 if mlp.up.bias is None else mlp.up.bias[part])
            if mlp.gate_proj is None:
                h = activation(up)
            else:
                h = activation(mlp.gate_proj.weight[part] @ row + mlp.gate_proj.bias[part]) * up
            y = y + opened[block] * (mlp.down.weight[:, part] @ h)
        rows.append(y if mlp.down.bias is None else y + mlp.down.bias)
    return torch.stack(rows).view(*x.shape[:-1], -1)


def make(hidden=50, activation="gelu", glu=False, dtype=torch.float64, **options):
    options = {"block_size": 8, "sparsity": 0.5, **options}
    return bg.DynamicSparseMLP(12, hidden, 10, activation=activation, glu=glu, dtype=dtype, **options).eval()


@pytest.mark.parametrize("glu", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("hidden", [48, 50, 7])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.99])
def test_output_and_all_gradients_are_those_of_the_formula(hidden, activation, glu, sparsity):
    mlp = make(hidden, activation, glu, sparsity=sparsity)
    x = torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True)
    values, indices = mlp.gate(x.view(-1, 12))
    gates = values.new_zeros(6, mlp.grid.num_blocks).scatter(1, indices, values).view(2, 3, -1)
    assert_close(mlp.gates(x), gates)
    expected = formula(mlp, x, gates, ACTIVATIONS[activation])
    y = mlp(x)
    assert_close(y, expected)
    inputs = [x, *mlp.parameters()]
    grad = torch.randn_like(y)
    for name, got, want in zip(
        ["x", *dict(mlp.named_parameters())],
        gradients(y, inputs, grad),
        gradients(expected, inputs, grad),
        strict=True,
    ):
        assert_close(got, want, name)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_gradcheck(backend):
    mlp = make(20, glu=True, gate="topk", normalise="none", backend=backend)
    nn.init.ones_(mlp.gate.bias)
    names, parameters = zip(*mlp.named_parameters(), strict=True)

    def call(x, *values):
        return torch.func.functional_call(mlp, dict(zip(names, values, strict=True)), (x,))

    x = torch.randn(3, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(call, (x, *parameters), check_batched_grad=False)


@pytest.mark.parametrize("glu", [False, True])
def test_with_unit_gates_it_is_the_dense_mlp(glu):
    mlp = make(glu=glu, activation="silu", gate="sigmoid", sparsity=0.0)
    nn.init.zeros_(mlp.gate.weight)
    nn.init.zeros_(mlp.gate.bias)
    x = torch.randn(5, 12, dtype=torch.float64)
    up = F.linear(x, mlp.up.weight, mlp.up.bias)
    hidden = F.silu(F.linear(x, mlp.gate_proj.weight, mlp.gate_proj.bias)) * up if glu else F.silu(up)
    assert_close(mlp(x), F.linear(hidden, mlp.down.weight, mlp.down.bias))


def test_closed_channels_count_as_zero_whatever_their_bias_and_activation():
    mlp = make(48, activation=nn.Sigmoid(), gate="topk", normalise="none", select="global", sparsity=0.9)
    nn.init.zeros_(mlp.gate.weight)
    with torch.no_grad():
        mlp.gate.bias.copy_(torch.tensor([-1.0, -1, 2, -1, -1, -1]))
    x = torch.randn(4, 12, dtype=torch.float64)
    expected = mlp(x)
    with torch.no_grad():
        closed = torch.ones(48, dtype=torch.bool)
        closed[16:24] = False
        mlp.up.bias[closed] += 1e6
    assert_close(mlp(x), expected)
    with torch.no_grad():
        mlp.gate.bias.fill_(-1.0)
    assert_close(mlp(x), mlp.down.bias.expand(4, 10))


def test_hidden_dropout_is_that_of_the_dense_mlp():
    mlp = make(4000, gate="sigmoid", sparsity=0.0, dropout=0.5, block_size=400).train()
    x = torch.randn(1, 12, dtype=torch.float64)
    torch.manual_seed(0)
    mean = torch.stack([mlp(x) for _ in range(200)]).mean(0)
    mlp.eval()
    assert torch.equal(mlp(x), mlp(x))
    assert (mean - mlp(x)).norm() < 0.2 * mlp(x).norm()


def test_every_kind_that_chooses_among_all_blocks_works():
    for gate in ("margin", "topk", "eq1", "softmax_sum"):
        mlp = make(64, gate=gate)
        x = torch.randn(3, 12, dtype=torch.float64, requires_grad=True)
        assert_close(mlp(x), formula(mlp, x, mlp.gates(x), ACTIVATIONS["gelu"]), gate)
        assert (mlp.gates(x) != 0).sum(-1).max() <= 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate": "norm"}, "gate and select: expected a gate that chooses among all hidden blocks"),
        ({"select": "per_row"}, "gate and select: expected a gate that chooses among all hidden blocks"),
        ({"block_size": (8, 4)}, "block_size: expected one int, the hidden channels of a block, or (that, 12)"),
        ({"activation": "tanh"}, "activation: expected one of ('gelu', 'gelu_tanh', 'relu', 'silu'), or a module"),
        ({"dropout": 1.0}, "dropout: expected a number in [0, 1)"),
    ],
)
def test_bad_options_are_one_clear_error(options, message):
    with raises_blockgate(message):
        make(**options)


def test_bad_input_is_one_clear_error():
    with raises_blockgate("input: expected shape (..., 12)"):
        make()(torch.randn(3, 11, dtype=torch.float64))


def test_activations_are_known_by_their_values():
    known = {
        "gelu": [nn.GELU(), F.gelu],
        "gelu_tanh": [nn.GELU("tanh")],
        "relu": [nn.ReLU(), torch.relu],
        "silu": [nn.SiLU(), F.hardswish],
    }
    assert [name_of_activation(f) for f in known["gelu"]] == ["gelu"] * 2
    assert [name_of_activation(f) for f in known["gelu_tanh"]] == ["gelu_tanh"]
    assert [name_of_activation(f) for f in known["relu"]] == ["relu"] * 2
    assert [name_of_activation(f) for f in known["silu"]] == ["silu", None]
    assert name_of_activation(nn.Tanh()) is None
    assert name_of_activation(lambda x: x.sum()) is None


def test_it_trains_copies_and_loads():
    mlp = make(64, dtype=torch.float32).train()
    optimizer = torch.optim.Adam(mlp.parameters(), 1e-2)
    x, wanted = torch.randn(64, 12), torch.randn(64, 10)
    losses = []
    for _ in range(60):
        loss = F.mse_loss(mlp(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    mlp.eval()
    again = make(64, dtype=torch.float32, sparsity=0.25)
    again.load_state_dict(mlp.state_dict())
    for other in (again, copy.deepcopy(mlp)):
        assert torch.equal(other(x), mlp(x))
    mlp.sparsity = 0.75
    assert (mlp.gates(x) != 0).sum(-1).eq(2).all()


def test_it_compiles_and_exports():
    mlp = make(64, glu=True, dtype=torch.float32).eval()
    x = torch.randn(5, 12)
    with torch.no_grad():
        assert_close(torch.compile(mlp, backend="eager", fullgraph=True)(x), mlp(x))
        assert_close(exportable(mlp)(x), mlp(x))
    with warnings.catch_warnings(), raises_blockgate("Export blockgate.integrations.onnx.exportable(model) instead."):
        warnings.simplefilter("ignore")
        torch.onnx.export(mlp, (x,), io.BytesIO(), dynamo=False)


def test_autocast_computes_as_gated_layers_do():
    mlp = make(64, dtype=torch.float32)
    x = torch.randn(3, 12)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = mlp(x)
    assert y.dtype is torch.bfloat16
    with torch.no_grad():
        assert_close(y, mlp(x))
