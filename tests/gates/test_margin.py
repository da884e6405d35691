"""Margin gates: exactly k open, no block dies by drifting, and a trained layer is kept as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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
    gate = MarginGate(BlockGrid(4, 64, (4, 1)), GateSpec(sparsity=0.9, key_size=None)).eval()
    x, y = torch.randn(2, 64)
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


def test_a_small_step_of_the_gates_hardly_moves_a_trained_layer():
    dense = nn.Linear(256, 128)
    layer = bg.DynamicSparseLinear.from_dense(dense, gate="margin", block_size=16, sparsity=0.0)
    with torch.no_grad():
        for parameter in layer.gate.parameters():
            # What a first step of Adam at a rate of 3e-4 does.
            parameter += 3e-4 * torch.randn_like(parameter).sign()
    x = torch.randn(50, 256)
    assert ((layer(x) - dense(x)).norm() / dense(x).norm()).item() < 0.05


HIDDEN = [None, 5]


def trained_means(gate_hidden, make=bg.DynamicSparseLinear):
    """A layer that has seen rows with a mean of 3."""
    layer = make(24, 16, block_size=(4, 3), sparsity=0.5, key_size=None, gate="margin", gate_hidden=gate_hidden)
    for _ in range(400):
        layer(3 + torch.randn(8, 4, 24))
    return layer


@pytest.mark.parametrize("gate_hidden", HIDDEN)
def test_the_key_is_read_less_its_running_mean(gate_hidden):
    gate = trained_means(gate_hidden).gate.eval()
    assert (gate.key_mean - 3).abs().max() < 0.3
    x = 3 + torch.randn(50, 24)
    read = x - gate.key_mean
    if gate_hidden:
        read = torch.relu(read @ gate.hidden_weight.T + gate.hidden_bias) - gate.hidden_mean
        assert (gate.hidden_mean > 0).any()
    assert_close(gate.scores(x), read @ gate.weight.T + gate.bias)


def test_what_all_inputs_share_reaches_the_bias_alone():
    """The gradient of the weight is that of the key's deviations: 0 if every row is the mean."""
    gate = trained_means(None).gate.eval()
    gate.scores(gate.key_mean.expand(10, 24)).sum().backward()
    assert gate.weight.grad.abs().max() < 1e-4
    assert_close(gate.bias.grad, torch.full_like(gate.bias, 10.0))


def test_means_move_in_training_only():
    layer = trained_means(5).eval()
    before = {name: mean.clone() for name, mean in layer.gate.named_buffers()}
    layer(torch.randn(8, 24))
    for name, mean in layer.gate.named_buffers():
        assert torch.equal(mean, before[name])
    layer.gate.reset_parameters()
    assert not any(mean.any() for mean in layer.gate.buffers())


@pytest.mark.parametrize("gate_hidden", HIDDEN)
@pytest.mark.parametrize("make", [bg.DynamicSparseLinear, bg.DynamicSparseLSTM])
def test_every_path_reads_the_same_key(make, gate_hidden):
    layer = trained_means(gate_hidden, make).eval()
    x = 3 + torch.randn(5, 4, 24)

    def output(model):
        y = model(x)
        return y[0] if isinstance(y, tuple) else y

    expected = output(layer).detach()  # op by op
    with torch.no_grad():
        assert_close(output(layer), expected)
        assert_close(output(bg.pack(layer, "float32")), expected)
        for gate in (module for module in layer.modules() if isinstance(module, MarginGate)):
            gate.key_mean += 1.0
            gate.bias += (gate.weight * 1.0).sum(1) if gate.hidden_weight is None else 0.0
            if gate.hidden_weight is not None:
                gate.hidden_bias += gate.hidden_weight.sum(1)
        # The same function written otherwise: prepared copies follow the means.
        assert_close(output(layer), expected)


def test_means_are_part_of_checkpoints():
    layer = trained_means(5)
    other = bg.DynamicSparseLinear(24, 16, block_size=(4, 3), sparsity=0.5, key_size=None, gate="margin", gate_hidden=5)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(6, 24)
    assert_close(other.eval()(x), layer.eval()(x))


@pytest.mark.parametrize("make", [bg.DynamicSparseLinear, bg.DynamicSparseLSTM])
def test_a_layer_may_be_called_twice_before_the_gradient(make):
    layer = make(24, 16, block_size=(4, 3), sparsity=0.5, gate="margin", gate_hidden=5)
    outputs = [layer(torch.randn(3, 2, 24)) for _ in range(2)]
    sum((y[0] if isinstance(y, tuple) else y).sum() for y in outputs).backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("gate_hidden", HIDDEN)
def test_activation_checkpointing_changes_nothing(gate_hidden, reentrant):
    layer = trained_means(gate_hidden)
    other = copy.deepcopy(layer)
    x = 2 + torch.randn(64, 24)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    checkpoint(layer, inputs[0], use_reentrant=reentrant).square().sum().backward()
    other(inputs[1]).square().sum().backward()
    assert_close(inputs[0].grad, inputs[1].grad)
    for one, two in zip(layer.parameters(), other.parameters(), strict=True):
        assert_close(one.grad, two.grad)
    for one, two in zip(layer.gate.buffers(), other.gate.buffers(), strict=True):
        assert_close(one, two)


def test_an_lstm_tells_its_gates_once_however_it_runs():
    def means(run):
        torch.manual_seed(0)
        lstm = bg.DynamicSparseLSTM(24, 16, 2, block_size=(4, 3), sparsity=0.5, gate="margin")
        told = []
        for name, module in lstm.named_modules():
            if isinstance(module, MarginGate):
                module.observe = lambda x, name=name: told.append((name, len(x)))
        run(lstm)
        return told

    x = torch.randn(5, 3, 24)

    def recorded(lstm):
        with bg.record_gates(lstm):
            lstm(x)

    expected = [(f"gate_{part}_l{layer}", 15) for layer in (0, 1) for part in ("ih", "hh")]
    assert means(lambda lstm: lstm(x)) == expected
    assert means(recorded) == expected
    ends = nn.utils.rnn.pack_sequence([torch.randn(length, 24) for length in (5, 3, 1)])
    assert means(lambda lstm: lstm(ends)) == [(name, 9) for name, _ in expected]


def test_a_batch_that_is_not_finite_does_not_stay_in_the_means():
    layer = trained_means(5)
    x = torch.randn(8, 24)
    layer(x.index_fill(1, torch.tensor([3]), float("inf")))
    assert all(mean.isfinite().all() for mean in layer.gate.buffers())
    assert layer(x).isfinite().all()


def test_near_dense_is_part_of_a_checkpoint_and_survives_a_reset():
    dense = nn.Linear(24, 16)
    options = {"block_size": (4, 3), "sparsity": 0.5, "gate": "margin"}
    layer = bg.DynamicSparseLinear.from_dense(dense, **options)
    other = bg.DynamicSparseLinear(24, 16, **options)
    other.load_state_dict(layer.state_dict())
    assert layer.spec.near_dense
    assert other.spec == layer.spec
    x = torch.randn(6, 24)
    assert_close(other.eval()(x), layer.eval()(x))
    layer.reset_parameters()
    assert layer.spec.near_dense
    with raises_blockgate("near_dense"):
        GateSpec(near_dense="no")


@pytest.mark.parametrize("gate_hidden", HIDDEN)
def test_prepared_copies_follow_the_means(gate_hidden):
    layer = trained_means(gate_hidden).eval()
    x = 3 + torch.randn(20, 24)
    with torch.no_grad():
        before = layer(x)
        for mean in layer.gate.buffers():
            mean += torch.randn_like(mean)
        after = layer(x)
    assert not torch.equal(after, before)
    assert_close(after, layer(x).detach())  # op by op
