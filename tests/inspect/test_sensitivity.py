"""What layers lose by closing blocks, and the levels that follow from it."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.inspect.costs import time_levels
from blockgate.inspect.timing import Timing
from tests.helpers import raises_blockgate


def two_layers():
    """The second layer reads inputs of which half are 0, so it can close half of its columns for nothing."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 32), nn.Hardtanh(0, 1), nn.Linear(32, 32), nn.Linear(32, 4))
    with torch.no_grad():
        model[0].weight[16:] = 0
        model[0].bias[16:] = -1
        model[0].bias[:16] = 0.5
    bg.sparsify_(model, gate="norm", block_size=(32, 1), sparsity=0.1)
    return model


BATCHES = [torch.randn(8, 32, generator=torch.Generator().manual_seed(n)) for n in range(2)]


def squared(model, batch):
    return model(batch).square().mean()


def test_sensitivity_measures_one_layer_at_a_time():
    model, steps = two_layers(), []
    found = bg.sensitivity(model, BATCHES, levels=(0.5, 0.75), loss=squared, progress=lambda *at: steps.append(at))
    first, second = found.layers
    assert [first.name, second.name] == ["0", "2"]
    assert first.macs == second.macs == 32 * 32 * 16
    # Half of the columns, and a product for each input in the gate.
    assert first.costs == {0.0: 32 * 32 * 16, 0.5: (16 * 32 + 32) * 16, 0.75: (8 * 32 + 32) * 16}
    assert first.rows == 16
    assert second.errors[0.5] < 1e-6 < second.errors[0.75]
    assert abs(second.losses[0.5]) < 1e-6
    x = torch.cat(BATCHES)
    with torch.no_grad():
        model[0].sparsity, model[2].sparsity = 0.0, 0.0
        dense, base = model[0](x), squared(model, x)
        model[0].sparsity = 0.5
        assert first.errors[0.5] == pytest.approx(((model[0](x) - dense).norm() / dense.norm()).item(), rel=1e-4)
        assert first.losses[0.5] == pytest.approx((squared(model, x) - base).item(), rel=1e-3)
    assert found.loss == pytest.approx(base.item(), rel=1e-4)
    assert steps[-1] == (6, 6)
    assert "50.0%" in str(found)
    assert found.to_dict()["layers"][0]["name"] == "0"


def test_sensitivity_leaves_the_model_as_it_was():
    model = two_layers().train()
    bg.sensitivity(model, BATCHES, levels=(0.5,))
    assert [model[0].sparsity, model[2].sparsity] == [0.1, 0.1]
    assert model.training
    assert not model[0]._forward_hooks


def test_allocation_saves_where_it_hurts_least():
    model = two_layers()
    for loss in (None, squared):
        found = bg.allocate(model, BATCHES, 0.23, levels=(0.5, 0.75), loss=loss)
        assert found.sparsities == {"0": 0.0, "2": 0.5}
        # A quarter of the products, less what the gate takes.
        assert found.saved == pytest.approx(0.25 - 1 / 64)
    more = bg.allocate(model, BATCHES, 0.4, levels=(0.5, 0.75))
    assert more.saved >= 0.4
    assert more.expected > found.expected
    bg.set_sparsity(model, found.sparsities)
    assert model[2].sparsity == 0.5
    fresh = nn.Sequential(nn.Linear(32, 32), nn.Hardtanh(0, 1), nn.Linear(32, 32), nn.Linear(32, 4))
    report = bg.sparsify_(fresh, found, gate="norm", block_size=(32, 1))
    assert [entry.name for entry in report.converted] == ["2"]
    assert fresh[2].sparsity == 0.5
    assert "23.4% of multiply-adds saved, gates counted" in str(found)


def test_a_gate_that_costs_more_than_it_saves_is_not_chosen():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    # The first gate has as many multiply-adds as its layer, the second an eighth of them.
    bg.sparsify_(
        model,
        filter_fn=lambda *_: True,
        options={"0": {"block_size": 8, "key_size": None}, "2": {"block_size": 16, "key_size": 32}},
    )
    batches = [torch.randn(8, 64)]
    known = bg.sensitivity(model, batches, levels=(0.5,))
    assert known.layers[0].costs[0.5] > known.layers[0].costs[0.0]
    assert bg.allocate(model, batches, 0.15, measured=known).sparsities == {"0": 0.0, "2": 0.5}
    with raises_blockgate("budget: expected at most"):
        bg.allocate(model, batches, 0.3, measured=known)


def test_a_budget_of_time(monkeypatch):
    costs = sys.modules["blockgate.inspect.costs"]
    timed = []

    def interleave(calls, *, seconds):
        for call in calls.values():
            call()
        timed.append(list(calls))
        # Closing half gains nothing in the first shape that comes, most in the second.
        gain = {"0.0": 1.0, "0.5": 1.1 if len(timed) == 1 else 0.4}
        return {name: Timing.of([[gain[name] * seconds]]) for name in calls}

    monkeypatch.setattr(costs, "interleave", interleave)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 16), nn.Linear(16, 48))
    bg.sparsify_(model, gate="norm", block_size=(64, 1), filter_fn=lambda *_: True)
    steps = []
    found = bg.allocate(
        model, [torch.randn(3, 16)], 0.15, levels=(0.5,), cost="time", progress=lambda *at: steps.append(at)
    )
    # Two shapes, so two measurements: the third layer has the times of the first.
    assert timed == [["0.0", "0.5"], ["0.0", "0.5"]]
    assert found.sparsities == {"0": 0.0, "2": 0.5, "3": 0.0}
    assert found.saved == pytest.approx(0.6 / 3)
    assert "20.0% of time saved" in str(found)
    assert steps[-1] == (3, 3)
    lstm = bg.DynamicSparseLSTM(8, 8, block_size=4)
    with raises_blockgate("cost: expected 'macs', for a model whose gated layers aren't all linear ones"):
        bg.allocate(lstm, [torch.randn(3, 2, 8)], 0.1, cost="time")
    with raises_blockgate("cost: expected one of ('macs', 'time'), got 'bytes'"):
        bg.allocate(model, [torch.randn(3, 16)], 0.1, cost="bytes")


def test_times_of_levels_are_real():
    model = nn.Sequential(nn.Linear(256, 512))
    bg.sparsify_(model, gate="norm", block_size=(512, 1), filter_fn=lambda *_: True)
    found = time_levels({"0": model[0]}, {"0": torch.randn(1, 256)}, (0.5,), dtype="int8", seconds=0.01)
    assert set(found["0"]) == {0.0, 0.5}
    assert all(seconds > 0 for seconds in found["0"].values())


def test_a_bar_on_demand(capsys):
    bg.sensitivity(two_layers(), BATCHES, levels=(0.5,), progress=True)
    assert "sensitivity" in capsys.readouterr().out
    bg.sensitivity(two_layers(), BATCHES, levels=(0.5,), progress=False)
    assert not capsys.readouterr().out


def test_the_bar_needs_rich(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with raises_blockgate("progress=True: expected rich, got none"):
        bg.sensitivity(two_layers(), BATCHES, levels=(0.5,), progress=True)


def test_allocation_follows_costs():
    model = two_layers()
    known = bg.sensitivity(model, BATCHES, levels=(0.5,))
    # Measured: the second layer gains nothing, so the first has to save.
    costs = {"0": {0.0: 1.0, 0.5: 0.4}, "2": {0.0: 1.0, 0.5: 1.0}}
    assert bg.allocate(model, BATCHES, 0.3, measured=known, costs=costs).sparsities == {"0": 0.5, "2": 0.0}
    with raises_blockgate("budget: expected at most 0.3"):
        bg.allocate(model, BATCHES, 0.4, measured=known, costs=costs)
    with raises_blockgate("costs: expected one for 0 and each level of '2'"):
        bg.allocate(model, BATCHES, 0.3, measured=known, costs={"0": costs["0"]})


def test_mistakes():
    with raises_blockgate("expected one with gated layers"):
        bg.sensitivity(nn.Linear(3, 3), BATCHES)
    with raises_blockgate("batches: expected a list of inputs"):
        bg.sensitivity(two_layers(), BATCHES[0])
