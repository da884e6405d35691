"""Learning rates, averages and ramps against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch import nn

import blockgate as bg
from blockgate.lab.training.config import AnnealConfig, OptimizerConfig, RampConfig, ScheduleConfig
from blockgate.lab.training.hooks import AnnealHook, RampHook, WeightAverage
from blockgate.lab.training.optimizer import LearningRate, make_optimizer
from tests.helpers import assert_close, raises_blockgate


def factors(config: ScheduleConfig, times: list[float], epochs: int = 8) -> list[float]:
    rate = LearningRate(config, epochs)
    return [rate.factor(time) for time in times]


def test_pure_schedules_against_hand_computed_values():
    assert factors(ScheduleConfig(), [0, 3.5, 8]) == [1, 1, 1]
    step = ScheduleConfig(kind="step", factor=0.5, begin=2, every=3)
    assert factors(step, [0, 1.9, 2, 4.9, 5, 7.9, 8]) == [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125]
    cosine = factors(ScheduleConfig(kind="cosine"), [0, 2, 4, 6, 8])
    expected = [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]
    assert cosine == pytest.approx(expected, abs=1e-12)
    assert factors(ScheduleConfig(warmup=2), [0.5, 1, 2, 3]) == [0.25, 0.5, 1, 1]


def test_the_plateau_halves_after_its_patience():
    rate = LearningRate(ScheduleConfig(kind="plateau", factor=0.5, patience=1), 10)
    seen = []
    for score in (10, 9, 9.5, 9.2, 9.1, 9.0, 8, 8.5, 8.5):
        rate.after_epoch(score, changed=False)
        seen.append(rate.factor(0))
    # 9.5 is forgiven, 9.2 halves; 9.1 is forgiven, 9.0 (no better than 9) halves; 8 improves.
    assert seen == [1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125]


def test_the_plateau_compares_anew_when_the_model_was_changed():
    rate = LearningRate(ScheduleConfig(kind="plateau"), 10)
    for score, changed in ((9, False), (12, True), (11, False), (13, False)):
        rate.after_epoch(score, changed=changed)
    assert (rate.best, rate.falls) == (11, 1)


def test_a_schedule_goes_on_from_its_state():
    config = ScheduleConfig(kind="plateau", patience=1)
    rate, copy = LearningRate(config, 10), LearningRate(config, 10)
    for score in (5, 6, 7, 8):
        rate.after_epoch(score, changed=False)
    copy.load_state_dict(rate.state_dict())
    for one in (rate, copy):
        one.after_epoch(9, changed=False)
    assert copy.state_dict() == rate.state_dict() == {"best": 5, "bad_epochs": 0, "falls": 2}


def test_gates_have_their_own_learning_rate():
    model = nn.Sequential(nn.Linear(8, 8), bg.DynamicSparseLinear(8, 8, block_size=4))
    optimizer = make_optimizer(model, OptimizerConfig(lr=0.5, gate_lr=0.1))
    weights, gates = optimizer.param_groups
    assert (weights["lr"], gates["lr"]) == (0.5, 0.1)
    assert {id(p) for p in gates["params"]} == {id(p) for p in model[1].gate.parameters()}
    assert len(weights["params"]) == 4
    assert len(make_optimizer(nn.Linear(2, 2), OptimizerConfig()).param_groups) == 1
    assert isinstance(make_optimizer(model, OptimizerConfig(kind="adam")), torch.optim.Adam)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_gradients_that_a_scaler_scales_can_be_clipped(kind):
    # Fused optimizers can't: they undo the scaling by themselves, after clipping.
    precision = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    fabric = Fabric(accelerator="cpu", devices=1, plugins=precision)
    layer = nn.Linear(4, 3)
    model, optimizer = fabric.setup(layer, make_optimizer(layer, OptimizerConfig(kind=kind)))
    fabric.backward(100 * model(torch.ones(2, 4)).square().sum())
    fabric.clip_gradients(model, optimizer, max_norm=0.5)
    norm = torch.cat([parameter.grad.flatten() for parameter in layer.parameters()]).norm()
    torch.testing.assert_close(norm, torch.tensor(0.5), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("lr", "gate_lr"), [(0.0, None), (-1.0, None), (math.inf, None), (math.nan, None), (1.0, -1.0)]
)
def test_bad_learning_rates_are_refused(lr, gate_lr):
    with raises_blockgate("learning rate"):
        make_optimizer(nn.Linear(2, 2), OptimizerConfig(lr=lr, gate_lr=gate_lr))


def test_bad_schedules_are_refused():
    for config in (ScheduleConfig(factor=0), ScheduleConfig(factor=2), ScheduleConfig(every=0)):
        with raises_blockgate("schedule"):
            LearningRate(config, 3)


def test_averages_begin_when_validation_stops_improving():
    model = nn.Linear(1, 1, bias=False)
    average = WeightAverage(model, patience=1)

    def move_to(value: float) -> None:
        nn.init.constant_(model.weight, value)
        average.after_update()

    for score in (5, 6):
        move_to(100.0)
        average.after_epoch(score)
    assert not average.started
    move_to(1.0)
    average.after_epoch(7)
    move_to(2.0)
    move_to(6.0)
    copy = WeightAverage(model, patience=1)
    copy.load_state_dict(average.state_dict())
    for one in (average, copy):
        with one.evaluation():
            assert_close(model.weight.detach(), torch.tensor([[3.0]]))
        assert model.weight.item() == 6.0


def test_averages_begin_after_a_number_of_updates():
    model = nn.Linear(1, 1, bias=False)
    average = WeightAverage(model, patience=0, begin=2)
    for value, mean in ((100.0, 100.0), (1.0, 1.0), (2.0, 1.5), (6.0, 3.0)):
        nn.init.constant_(model.weight, value)
        average.after_update()
        average.after_epoch(value)
        copy = WeightAverage(model, patience=0, begin=2)
        copy.load_state_dict(average.state_dict())
        average = copy
        with average.evaluation():
            assert_close(model.weight.detach(), torch.tensor([[mean]]))
        assert model.weight.item() == value


@pytest.mark.parametrize(("every", "steps"), [("epoch", 4), ("update", 40)])
def test_ramps_count_epochs_or_updates(every, steps):
    model = bg.DynamicSparseLinear(8, 8, block_size=2, sparsity=0.8)
    hook = RampHook(model, 0.8, RampConfig(begin=1, end=3, every=every), updates_per_epoch=10)
    seen = []
    for _ in range(steps):
        seen.append(model.sparsity)
        (hook.after_epoch if every == "epoch" else lambda _: hook.after_update())(0.0)
    per_epoch = seen if every == "epoch" else seen[::10]
    assert per_epoch == pytest.approx([0, 0, 0.4, 0.8])
    assert hook.settled
    assert hook.sparsity == 0.8


def test_annealing_counts_updates():
    model = bg.DynamicSparseLinear(8, 8, block_size=2, sparsity=0.5, gate="softmax_sum")
    hook = AnnealHook(model, AnnealConfig(begin=0.5, end=1.5, initial=1.0, final=0.01), updates_per_epoch=4)
    seen, settled = [], []
    for _ in range(7):
        seen.append(model.gate.temperature)
        settled.append(hook.settled)
        hook.after_update()
        hook.after_epoch(0.0)
    assert seen == pytest.approx([1, 1, 1, 0.01**0.25, 0.1, 0.01**0.75, 0.01])
    assert settled == [False] * 6 + [True]
    assert hook.sparsity is None
