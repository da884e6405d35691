"""The losses are what they say by hand, and training with them gives gates that are more balanced, or more local."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import blockgate as bg
from blockgate.gates import Gate
from blockgate.gates.topk import TopKGate
from blockgate.spec import GateSpec
from tests.helpers import assert_close, raises_blockgate
from tests.inspect.helpers import GATE_OPTIONS, inputs, layer_that_opens, run_and_fail, small_net


@pytest.fixture
def one_thread():
    """Threads only get in each other's way on matrices this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class AllOpen(Gate):
    """A kind of gate that the losses have never heard of."""

    kind = "all_open"

    def count_open(self, sparsity):  # noqa: ARG002
        return self.grid.num_blocks

    def forward(self, x):
        blocks = torch.arange(self.grid.num_blocks).expand(len(x), -1)
        return torch.ones(blocks.shape), blocks


def losses_of(model, x):
    with bg.inspect.gate_losses(model) as losses:
        model(x)
    return losses


def test_balance_by_hand():
    layer = layer_that_opens([[0], [1]])
    # Scores are 1 for the chosen block and -1 for the other three.
    high, low = torch.tensor([1.0, -1.0]).exp()
    p = torch.stack([high, low]) / (high + 3 * low)
    always_the_same = 4 * p[0]
    half_and_half = 4 * (p[0] + p[1]) / 2
    assert_close(losses_of(layer, inputs(layer, [0, 0])).balance(), always_the_same)
    assert_close(losses_of(layer, inputs(layer, [0, 1])).balance(), half_and_half)
    even = layer_that_opens([[0], [1], [2], [3]])
    assert_close(losses_of(even, inputs(even, [0, 1, 2, 3])).balance(), torch.tensor(1.0))


def test_balance_within_rows_of_blocks():
    layer = layer_that_opens([[0, 2], [1, 2]])
    gate = TopKGate(layer.grid, GateSpec(sparsity=0.5, select="per_row", normalise="none", key_size=None))
    gate.load_state_dict(layer.gate.state_dict() | {"sparsity": torch.tensor(0.5)})
    layer.gate = gate
    # The first row of blocks is balanced, the second always opens block 2 and never 3.
    p = torch.softmax(torch.tensor([1.0, -1.0]), 0)[0]
    assert_close(losses_of(layer, inputs(layer, [0, 1])).balance(), (1 + 2 * p) / 2)


def test_locality_by_hand():
    layer = layer_that_opens([[0, 1], [2, 3]])
    # Two patterns, equally often: the change between them is four times the variance, and half of that counts.
    x = inputs(layer, [0, 0, 1, 1])
    assert losses_of(layer, x).locality(4).item() == pytest.approx(2 / 3)
    assert losses_of(layer, x).locality(2).item() == pytest.approx(2)
    assert losses_of(layer, x).locality(2, batch_first=True).item() == 0
    assert losses_of(layer, inputs(layer, [0, 1, 0, 1])).locality(2).item() == 0
    assert losses_of(layer, inputs(layer, [0, 0, 0])).locality(3).item() == 0


def test_locality_ignores_what_changes_no_choice():
    layer = bg.DynamicSparseLinear(3, 4, block_size=2, sparsity=0.5, key_size=None)
    x = torch.randn(20, 3)
    before = losses_of(layer, x).locality(20)
    with torch.no_grad():
        layer.gate.weight += torch.randn(3)  # the same for all blocks, another for each input
        layer.gate.bias += torch.randn(4)  # the same for all inputs
        layer.gate.weight *= 7
        layer.gate.bias *= 7
    assert_close(losses_of(layer, x).locality(20), before)


def test_rows_of_several_calls_are_one_sequence():
    layer = layer_that_opens([[0, 1], [2, 3]])
    with bg.inspect.gate_losses(layer) as losses:
        for number in (0, 0, 1, 1):
            layer(inputs(layer, [number]))
    assert losses.locality(4).item() == pytest.approx(2 / 3)
    assert_close(losses.balance(), losses_of(layer, inputs(layer, [0, 0, 1, 1])).balance())


@pytest.mark.parametrize("options", GATE_OPTIONS.values(), ids=GATE_OPTIONS)
def test_every_gate_kind_gets_gradients_and_gives_the_same_results(options):
    net = small_net(**options)
    x = torch.randn(12, 6)
    expected = net(x)
    with bg.inspect.gate_losses(net) as losses:
        y = net(x)
    torch.testing.assert_close(y, expected)
    loss = losses.locality(4)
    if options.get("gate") == "sigmoid":
        with raises_blockgate("layer '2': balance: expected gates that close blocks, got 'SigmoidGate'"):
            losses.balance()
    else:
        loss = loss + losses.balance()
    loss.backward()
    gates = [m for m in net.modules() if isinstance(m, Gate)]
    for gate in gates:
        # Every score gets some, those of closed blocks too.
        assert gate.weight.grad.abs().sum(1).ne(0).all()
    assert not any(gate._forward_hooks for gate in gates)


def test_activation_checkpointing_with_backward_inside():
    net = small_net(gate="topk")
    x = torch.randn(12, 6)
    with bg.inspect.gate_losses(net) as losses:
        y = checkpoint(net, x, use_reentrant=False)
        (y.sum() + losses.balance()).backward()
    checkpointed = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    with bg.inspect.gate_losses(net) as losses:
        y = net(x)
    (y.sum() + losses.balance()).backward()
    torch.testing.assert_close(checkpointed, [p.grad for p in net.parameters()])


def test_errors():
    layer = layer_that_opens([[0], [1]])
    with raises_blockgate("gate losses"):
        losses_of(layer, torch.zeros(0, 2)).balance()
    losses = losses_of(layer, inputs(layer, [0, 1, 1]))
    for steps in (1, 2.0, "3"):
        with raises_blockgate("steps"):
            losses.locality(steps)
    with raises_blockgate("a length that divides the 3 rows of gate"):
        losses.locality(2)
    with pytest.raises(ZeroDivisionError), bg.inspect.gate_losses(layer):
        run_and_fail(layer, [0])
    assert not layer.gate._forward_hooks


def test_kinds_of_others_get_losses_too():
    layer = layer_that_opens([[0], [1]])
    layer.gate = AllOpen(layer.grid, GateSpec(sparsity=0.0))
    # All four blocks are used alike, whatever their scores.
    losses = losses_of(layer, inputs(layer, [0, 1, 1]))
    assert_close(losses.balance(), torch.tensor(1.0))
    assert losses.locality(3) > 0


def train_classifier(seed, balance_weight):
    """Statistics, on fresh inputs, of the gate of a small classifier trained at a learning rate that is too high."""
    torch.manual_seed(seed)
    gated = bg.DynamicSparseLinear(64, 64, block_size=8, sparsity=0.875, key_size=None, gate="eq1")
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), gated, nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    teacher = torch.randn(16, 8)
    for _ in range(100):
        x = torch.randn(128, 16)
        with bg.inspect.gate_losses(net) as losses:
            task = nn.functional.cross_entropy(net(x), (x @ teacher).argmax(1))
        optimizer.zero_grad()
        (task + balance_weight * losses.balance()).backward()
        optimizer.step()
    with torch.no_grad(), bg.record_gates(net) as record:
        net(torch.randn(1000, 16))
    return record.gates["2"]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", [0, 1])
def test_training_with_balance_uses_more_blocks_more_evenly(seed):
    without, balanced = train_classifier(seed, 0.0), train_classifier(seed, 1.0)

    def unevenness(stats):
        return (stats.frequency().std() / stats.frequency().mean()).item()

    assert unevenness(without) > 1.5
    assert unevenness(balanced) < 0.75
    assert without.overlap().inputs > 0.45
    assert balanced.overlap().inputs < 0.25
    assert (balanced.open_counts == 0).sum() < 0.5 * (without.open_counts == 0).sum()


def slow_and_fast(steps, batch):
    """Sequences (T, N, 16) whose first 8 features change slowly; the others are drawn anew at every step."""
    x = torch.randn(steps, batch, 16)
    for step in range(1, steps):
        x[step, :, :8] = 0.9 * x[step - 1, :, :8] + 0.436 * x[step, :, :8]
    return x


def train_tagger(seed, locality_weight):
    """Overlap of neighbouring tokens, and of any two, after training a small tagger of sequences."""
    torch.manual_seed(seed)
    rnn = bg.DynamicSparseQRNN(16, 32, 1, window=1, gate="topk", block_size=8, sparsity=0.75, key_size=None)
    head = nn.Linear(32, 8)
    optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], lr=1e-2)
    for _ in range(100):
        x = slow_and_fast(12, 16)
        with bg.inspect.gate_losses(rnn) as losses:
            y = head(rnn(x)[0])
        # What to tell from each other: slow features and fast ones.
        task = nn.functional.cross_entropy(y.flatten(0, 1), x[..., 4:12].argmax(-1).flatten())
        optimizer.zero_grad()
        (task + locality_weight * losses.locality(12)).backward()
        optimizer.step()
    with torch.no_grad(), bg.record_gates(rnn, trace=500) as record:
        rnn(slow_and_fast(500, 1))
    stats = record.gates["filters.0"]
    opened = (stats.trace != 0).double()
    return ((opened[1:] * opened[:-1]).sum() / opened[1:].sum()).item(), stats.overlap().inputs


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", [0, 1])
def test_training_with_locality_makes_neighbours_agree_without_collapse(seed):
    neighbours_without, any_without = train_tagger(seed, 0.0)
    neighbours_with, any_with = train_tagger(seed, 1.0)
    assert neighbours_with > neighbours_without + 0.15
    # Tokens that are far apart still differ: the gain is not that all open the same.
    assert any_with < any_without + 0.12
