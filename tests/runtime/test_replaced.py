"""Weights that are computed on the way, gates whose methods were replaced, updates that leave no trace: never stale."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import blockgate as bg
from blockgate.gates import Gate
from blockgate.layers import DynamicSparseGRUCell, DynamicSparseLSTMCell

LAYERS = {
    "linear": (lambda: bg.DynamicSparseLinear(32, 32, block_size=16), "weight", (2, 32)),
    "lstm": (lambda: bg.DynamicSparseLSTM(32, 32, block_size=16), "weight_hh_l0", (4, 2, 32)),
    "gru": (lambda: bg.DynamicSparseGRU(32, 32, block_size=16), "weight_hh_l0", (4, 2, 32)),
    "both ways": (
        lambda: bg.DynamicSparseLSTM(32, 32, block_size=16, bidirectional=True),
        "weight_ih_l0_reverse",
        (4, 2, 32),
    ),
    "gru cell": (lambda: DynamicSparseGRUCell(32, 32, block_size=16), "weight_ih", (2, 32)),
    "cell": (lambda: DynamicSparseLSTMCell(32, 32, block_size=16), "weight_ih", (2, 32)),
}


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, weight):
        return weight * self.factor


class Noisy(nn.Module):
    def forward(self, weight):
        return weight * torch.rand(())


def output_of(layer, x):
    y = layer(x)
    return y[0] if isinstance(y, tuple) else y


def parametrized(layer, name):
    parametrize.register_parametrization(layer, name, Scaled())
    yield
    getattr(layer.parametrizations, name).original.mul_(3)


def factor_changed(layer, name):
    parametrize.register_parametrization(layer, name, Scaled())
    yield
    getattr(layer.parametrizations, name)[0].factor.fill_(5)


def weight_normed(layer, name):
    parametrizations.weight_norm(layer, name)
    yield
    getattr(layer.parametrizations, name).original0.mul_(3)


def mask_edited(layer, name):
    prune.l1_unstructured(layer, name, 0.5)
    yield
    layer._buffers[f"{name}_mask"].zero_()


def pruned_twice(layer, name):
    prune.l1_unstructured(layer, name, 0.3)
    yield
    prune.random_unstructured(layer, name, 0.5)


def one_key_loaded(layer, name):
    prune.l1_unstructured(layer, name, 0.5)
    yield
    layer.load_state_dict({f"{name}_orig": torch.randn_like(layer._parameters[f"{name}_orig"])}, strict=False)


def gate_parametrized(layer, name):
    gate = layer.get_submodule(name.replace("weight", "gate"))
    parametrize.register_parametrization(gate, "weight", Scaled())
    yield
    gate.parametrizations.weight.original.mul_(-3)


CHANGES = [
    parametrized,
    factor_changed,
    weight_normed,
    mask_edited,
    pruned_twice,
    one_key_loaded,
    gate_parametrized,
]


def assert_not_stale(layer, x, before):
    after = output_of(layer, x)
    assert not torch.equal(after, before)
    with torch.enable_grad():
        torch.testing.assert_close(after, output_of(layer, x).detach())


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
@torch.no_grad()
def test_weights_computed_on_the_way_are_never_stale(kind, change):
    make, name, shape = LAYERS[kind]
    layer, x = make().eval(), torch.randn(shape)
    output_of(layer, x)
    steps = change(layer, name)
    next(steps)
    before = output_of(layer, x)
    next(steps, None)
    assert_not_stale(layer, x, before)


@pytest.mark.parametrize("kind", LAYERS)
@torch.no_grad()
def test_a_random_parametrization_does_not_freeze(kind):
    make, name, shape = LAYERS[kind]
    layer, x = make().eval(), torch.randn(shape)
    output_of(layer, x)
    parametrize.register_parametrization(layer, name, Noisy())
    assert not torch.equal(output_of(layer, x), output_of(layer, x))


REPLACED = {
    "forward": lambda gate: lambda x: tuple(t * 2 if i == 0 else t for i, t in enumerate(type(gate).forward(gate, x))),
    "decide": lambda gate: (
        lambda x, _: tuple(t * 2 if i == 0 else t for i, t in enumerate(type(gate).forward(gate, x)))
    ),
    "scores": lambda gate: lambda x: -type(gate).scores(gate, x),
    "key_of": lambda gate: lambda x: -type(gate).key_of(gate, x),
    "network": lambda gate: lambda: type(gate).network(gate)._replace(weight=-gate.weight),
}


@pytest.mark.parametrize("method", REPLACED)
@pytest.mark.parametrize("kind", LAYERS)
@torch.no_grad()
def test_replaced_methods_of_a_gate_are_honoured(kind, method):
    make, name, shape = LAYERS[kind]
    layer, x = make().eval(), torch.randn(shape)
    before = output_of(layer, x)
    gate = layer.get_submodule(name.replace("weight", "gate"))
    setattr(gate, method, REPLACED[method](gate))
    assert_not_stale(layer, x, before)
    if kind == "linear" and method != "decide":
        assert "replaced" in layer.plan(x).why
        packed = bg.pack(layer)
        torch.testing.assert_close(packed(x), output_of(layer, x))


@pytest.mark.parametrize("kind", [*LAYERS, "packed"])
def test_tensors_may_be_swapped_while_loading(kind):
    make, _, shape = LAYERS.get(kind, LAYERS["linear"])
    layer, x = make().eval(), torch.randn(shape)
    layer = bg.pack(layer) if kind == "packed" else layer
    with torch.no_grad():
        before = output_of(layer, x)
    state = {
        key: value * 1.5 if value.dtype == torch.float32 else value
        for key, value in copy.deepcopy(layer.state_dict()).items()
    }
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.load_state_dict(state)
        with torch.no_grad():
            swapped = output_of(layer, x)
            layer.to(torch.float64).to(torch.float32)
            again = output_of(layer, x)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert not torch.equal(before, swapped)
    torch.testing.assert_close(swapped, again, rtol=0, atol=0)
    if kind != "packed":
        torch.testing.assert_close(swapped, output_of(layer, x).detach())
    assert any(isinstance(module, Gate) for module in layer.modules())
