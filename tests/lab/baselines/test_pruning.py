"""Magnitude pruning: the schedule and the masks by hand, what the optimizer may not undo, and going on after a stop."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from blockgate.lab.baselines import MagnitudePruner, prunable_weights
from tests.helpers import raises_blockgate


def pruner_of(weight, final=0.5, begin=1, end=1, every=1, **options):
    return MagnitudePruner({"w": weight}, final, begin, end, every, **{"initial": 0.0, **options})


def test_the_schedule_by_hand():
    pruner = pruner_of(nn.Parameter(torch.randn(20, 20)), 0.9, begin=1, end=25, every=3, initial=0.05)
    # The paper's schedule: 8 intervals, 0.9 - 0.85 * (1 - n / 8)^3 after the n-th.
    expected = {0: 0.0, 1: 0.05, 3: 0.05, 4: 0.9 - 0.85 * (7 / 8) ** 3, 13: 0.9 - 0.85 / 8, 15: 0.9 - 0.85 / 8}
    expected |= {22: 0.9 - 0.85 / 512, 24: 0.9 - 0.85 / 512, 25: 0.9, 100: 0.9}
    for step, sparsity in expected.items():
        assert pruner.sparsity_at(step) == pytest.approx(sparsity, abs=1e-12), step


def test_weights_follow_the_schedule():
    weight = nn.Parameter(torch.randn(40, 50))
    pruner = pruner_of(weight, 0.9, begin=2, end=7, every=3, initial=0.05)
    shares = []
    for _ in range(9):
        pruner.step()
        shares.append(float((weight == 0).double().mean()))
    # After 2 steps, after 5, and at the end, which the interval would miss.
    middle = round((0.9 - 0.85 * (2 / 5) ** 3) * 2000) / 2000
    assert shares == pytest.approx([0, 0.05, 0.05, 0.05, middle, middle, 0.9, 0.9, 0.9])


def test_the_smallest_weights_go():
    weight = nn.Parameter(torch.tensor([[0.5, -3.0, 0.1], [-0.2, 1.0, -0.6]]))
    pruner_of(weight).step()
    assert torch.equal(weight, torch.tensor([[0.0, -3.0, 0.0], [0.0, 1.0, -0.6]]))


def test_blocks_go_by_their_mean_square():
    weight = nn.Parameter(torch.tensor([[1.0, 1.0, 1.2, 9.0], [1.0, 1.0, 0.0, 0.0], [2.0, 0.0, 0.1, 0.1]]))
    # Mean squares: 1 and 20.6 above; below, in blocks of one row, 2 and 0.01.
    pruner_of(weight, block_size=2).step()
    expected = torch.tensor([[0.0, 0.0, 1.2, 9.0], [0.0, 0.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0]])
    assert torch.equal(weight, expected)


def test_equal_weights_go_from_the_end():
    weight = nn.Parameter(torch.ones(2, 4))
    pruner_of(weight, 0.25).step()
    assert torch.equal(weight, torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0]]))


@pytest.mark.parametrize("block_size", [None, 2])
def test_what_is_gone_stays_gone_under_any_optimizer(block_size):
    torch.manual_seed(1)
    lstm = nn.LSTM(6, 4)
    weights = prunable_weights(lstm)
    pruner = MagnitudePruner(weights, 0.8, 2, 8, 2, initial=0.3, block_size=block_size)
    optimizer = torch.optim.SGD(lstm.parameters(), lr=0.5, momentum=0.9, weight_decay=0.01)
    gone = {name: torch.zeros_like(w, dtype=torch.bool) for name, w in weights.items()}
    for _ in range(12):
        optimizer.zero_grad()
        lstm(torch.randn(5, 3, 6))[0].square().sum().backward()
        for name, weight in weights.items():
            assert not weight.grad[gone[name]].any()
            assert weight.grad.any()
        optimizer.step()
        pruner.step()
        for name, weight in weights.items():
            assert not weight[gone[name]].any()
            gone[name] = pruner.pruned.get(name, gone[name])
    assert all((w == 0).double().mean() >= 0.75 for w in weights.values())


@pytest.mark.parametrize("block_size", [None, 2])
def test_entries_that_were_moved_away_from_zero_do_not_come_back(block_size):
    weight = nn.Parameter(torch.arange(16.0).view(4, 4))
    pruner = pruner_of(weight, 0.5, 1, 3, 2, initial=0.25, block_size=block_size)
    pruner.step()
    gone = weight == 0
    for _ in range(2):
        with torch.no_grad():
            weight[gone] = 100.0
        pruner.step()
    assert gone.any()
    assert not weight[gone].any()
    assert (weight == 0).sum() == 8


def test_a_pruned_lstm_computes_with_its_pruned_weights():
    lstm = nn.LSTM(6, 4)
    other = copy.deepcopy(lstm)
    MagnitudePruner(prunable_weights(lstm), 0.5, 1, 1).step()
    other.load_state_dict(lstm.state_dict())
    x = torch.randn(5, 3, 6)
    assert torch.equal(lstm(x)[0], other(x)[0])
    assert (lstm.weight_hh_l0 == 0).sum() == 32


def test_going_on_from_a_checkpoint():
    def train(pruner, weight, steps):
        for _ in range(steps):
            with torch.no_grad():
                weight.add_(torch.randn(weight.shape, generator=generator))
            pruner.step()

    weights = [nn.Parameter(torch.ones(8, 8)) for _ in range(2)]
    pruners = [pruner_of(weight, 0.7, 1, 9, 2, initial=0.1) for weight in weights]
    generator = torch.Generator().manual_seed(3)
    train(pruners[0], weights[0], 4)
    state = copy.deepcopy(pruners[0].state_dict())
    with torch.no_grad():
        weights[1].copy_(weights[0])
    pruners[1].load_state_dict(state)
    for pruner, weight in zip(pruners, weights, strict=True):
        generator.manual_seed(4)
        train(pruner, weight, 8)
    assert torch.equal(weights[0], weights[1])
    assert pruners[1].steps_done == 12
    assert pruners[1].state_dict().keys() == state.keys()


def test_names_and_filter():
    model = nn.ModuleDict({"lstm": nn.LSTM(4, 4, 2), "out": nn.Linear(4, 9), "emb": nn.Embedding(9, 4)})
    names = [f"lstm.weight_{part}_l{layer}" for layer in (0, 1) for part in ("ih", "hh")]
    assert list(prunable_weights(model)) == [*names, "out.weight"]
    assert list(prunable_weights(model, lambda name: name.startswith("lstm."))) == names


def test_bad_options():
    weight = nn.Parameter(torch.ones(2, 2))
    with raises_blockgate("final: expected a number in [0, 1)"):
        pruner_of(weight, 1.0)
    with raises_blockgate("pruning: expected begin <= end and initial <= final"):
        pruner_of(weight, 0.5, begin=3, end=2)
    with raises_blockgate("pruning: expected begin <= end and initial <= final"):
        pruner_of(weight, 0.5, initial=0.6)
    with raises_blockgate("weights: expected one matrix or more"):
        MagnitudePruner({}, 0.5, 1, 2)
    with raises_blockgate("pruning state: expected steps_done"):
        pruner_of(weight).load_state_dict({"steps_done": 2, "pruned": {"other": torch.ones(2)}})
