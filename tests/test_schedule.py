from __future__ import annotations

import copy
import gc
import json
import re
import warnings

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import blockgate as bg
from blockgate.errors import BlockgateWarning
from blockgate.schedule import TemperatureRamp
from tests.helpers import raises_blockgate


def model() -> nn.Module:
    return nn.Sequential(*(bg.DynamicSparseLinear(8, 8, block_size=2, sparsity=0.0) for _ in range(2)))


def test_set_sparsity_reaches_every_layer():
    net = model()
    bg.set_sparsity(net, 0.75)
    assert [layer.sparsity for layer in net] == [0.75, 0.75]


def test_set_sparsity_changes_all_or_nothing():
    net = nn.Sequential(
        bg.DynamicSparseLinear(8, 8, block_size=2, sparsity=0.5),
        bg.DynamicSparseLinear(8, 8, block_size=2, sparsity=0.5, gate="softmax_sum"),
    )
    with raises_blockgate("opens at most the 8 heads"):
        bg.set_sparsity(net, 0.25)
    assert [layer.sparsity for layer in net] == [0.5, 0.5]


def test_set_sparsity_needs_gates():
    with raises_blockgate("model: expected one with gated layers, got 'Linear'"):
        bg.set_sparsity(nn.Linear(2, 2), 0.5)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("linear", [0, 0, 0, 0.2, 0.4, 0.6, 0.8, 0.8]),
        ("cubic", [0, 0, 0, 0.8 * (1 - 0.75**3), 0.8 * (1 - 0.5**3), 0.8 * (1 - 0.25**3), 0.8, 0.8]),
    ],
)
def test_ramp_step_by_step(shape, expected):
    net = model()
    ramp = bg.SparsityRamp(net, final=0.8, begin=2, end=6, shape=shape)
    seen = [net[0].sparsity]
    for _ in range(7):
        assert ramp.step() == ramp.sparsity
        seen.append(net[1].sparsity)
    assert seen == pytest.approx(expected)
    assert seen[-1] == 0.8


def test_ramp_may_start_above_zero_and_may_be_a_jump():
    assert bg.SparsityRamp(model(), 0.9, 0, 10, initial=0.5).sparsity == 0.5
    jump = bg.SparsityRamp(model(), 0.9, 3, 3)
    assert [jump.sparsity, *(jump.step() for _ in range(4))] == [0, 0, 0, 0.9, 0.9]


def test_ramp_resumes_from_a_checkpoint():
    ramp = bg.SparsityRamp(model(), 0.9, 1, 5)
    for _ in range(3):
        ramp.step()
    state = json.loads(json.dumps(ramp.state_dict()))
    net = model()
    resumed = bg.SparsityRamp(net, 0.9, 1, 5)
    resumed.load_state_dict(state)
    assert net[0].sparsity == ramp.sparsity
    assert resumed.step() == ramp.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"begin": 5, "end": 4}, "begin and end: expected 0 <= begin <= end, got (5, 4)"),
        ({"begin": -1}, "begin and end: expected 0 <= begin <= end, got (-1, 9)"),
        ({"begin": 0.5}, "begin and end: expected 0 <= begin <= end, got (0.5, 9)"),
        ({"end": None}, "begin and end: expected 0 <= begin <= end, got (0, None)"),
        ({"final": 1.0}, "final: expected a number in [0, 1), got 1.0"),
        ({"initial": -0.5}, "initial: expected a number in [0, 1), got -0.5"),
        ({"shape": "sine"}, "shape: expected one of ('linear', 'cubic'), got 'sine'"),
    ],
)
def test_bad_ramps_are_refused(arguments, message):
    with raises_blockgate(message, ValueError):
        bg.SparsityRamp(model(), **{"final": 0.9, "begin": 0, "end": 9, **arguments})


@pytest.mark.parametrize("state", [{}, None, {"steps_done": -1}, {"steps_done": "3"}, {"steps_done": True}])
def test_a_bad_state_is_refused(state):
    with raises_blockgate("ramp state: expected a dict with steps_done >= 0"):
        bg.SparsityRamp(model(), 0.9, 0, 9).load_state_dict(state)


def soft_model() -> nn.Module:
    """Two layers whose gates have a temperature, and one whose gate has none."""
    options = {"block_size": 2, "sparsity": 0.5}
    soft = (bg.DynamicSparseLinear(8, 8, gate="softmax_sum", **options) for _ in range(2))
    return nn.Sequential(*soft, bg.DynamicSparseLinear(8, 8, **options))


def temperatures(net) -> list[float]:
    return [net[0].gate.temperature, net[1].gate.temperature]


def test_temperature_step_by_step():
    net = soft_model()
    ramp = TemperatureRamp(net, begin=1, end=5, initial=2.0, final=0.125)
    seen = [temperatures(net)]
    for _ in range(6):
        assert ramp.step() == ramp.temperature
        seen.append(temperatures(net))
    assert seen == [pytest.approx([value, value]) for value in (2, 2, 1, 0.5, 0.25, 0.125, 0.125)]
    assert seen[-1] == [0.125, 0.125]
    assert not hasattr(net[2].gate, "temperature")


def test_temperature_falls_from_1_to_a_tenth_and_may_jump():
    ramp = TemperatureRamp(soft_model(), 0, 2)
    assert [ramp.temperature, *(ramp.step() for _ in range(2))] == pytest.approx([1, 0.1**0.5, 0.1])
    jump = TemperatureRamp(soft_model(), 1, 1)
    assert [jump.temperature, jump.step(), jump.step()] == [1, 0.1, 0.1]


def test_temperature_of_some_layers_resumes_from_a_checkpoint():
    net, fresh = soft_model(), soft_model()
    ramp = TemperatureRamp(net, 0, 4, layers="1")
    for _ in range(3):
        ramp.step()
    assert temperatures(net) == [1, pytest.approx(0.1**0.75)]
    resumed = TemperatureRamp(fresh, 0, 4, layers="1")
    resumed.load_state_dict(json.loads(json.dumps(ramp.state_dict())))
    assert temperatures(fresh) == temperatures(net)
    assert resumed.step() == ramp.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"begin": 5, "end": 4}, "begin and end: expected 0 <= begin <= end, got (5, 4)"),
        ({"final": 0}, "final: expected a positive number, got 0"),
        ({"initial": float("inf")}, "initial: expected a positive number, got inf"),
        ({"initial": True}, "initial: expected a positive number, got True"),
        ({"layers": "2"}, "temperature: expected a model with gates that have one"),
        ({"layers": "z"}, "name pattern: expected one that matches a layer"),
    ],
)
def test_bad_temperature_ramps_are_refused(arguments, message):
    net = soft_model()
    with raises_blockgate(message, ValueError):
        TemperatureRamp(net, **{"begin": 0, "end": 9, **arguments})
    assert temperatures(net) == [1, 1]


def test_temperature_needs_gates_that_have_one():
    message = "temperature: expected a model with gates that have one, got 'gates of the kinds margin'"
    with raises_blockgate(message):
        TemperatureRamp(model(), 0, 9)


def named_model() -> nn.Module:
    return nn.ModuleDict({"a": model(), "b": nn.Sequential(bg.DynamicSparseLinear(8, 8, block_size=2, sparsity=0.0))})


def sparsities(net) -> list[float]:
    return [net["a"][0].sparsity, net["a"][1].sparsity, net["b"][0].sparsity]


def test_set_sparsity_by_name():
    net = named_model()
    bg.set_sparsity(net, {"a.1": 0.75, "a": 0.5})
    assert sparsities(net) == [0.5, 0.75, 0]
    bg.set_sparsity(net, {"*.0": 0.25})
    assert sparsities(net) == [0.25, 0.75, 0.25]


def test_set_sparsity_by_any_name_of_a_shared_layer():
    net = named_model()
    net["c"] = net["b"][0]
    bg.set_sparsity(net, {"c": 0.5})
    assert sparsities(net) == [0, 0, 0.5]


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"a": 0.5, "z": 0.5}, "name pattern: expected one that matches a layer: 'a.0.gate', "),
        ({"a": 0.5, "b": 1.5}, "sparsity: expected a number in [0, 1), got 1.5"),
        ({"a": 0.5, "s": 0.25}, "opens at most the 8 heads"),
    ],
)
def test_set_sparsity_by_name_changes_all_or_nothing(mapping, message):
    net = named_model()
    net["s"] = bg.DynamicSparseLinear(8, 8, block_size=2, sparsity=0.5, gate="softmax_sum")
    with raises_blockgate(message):
        bg.set_sparsity(net, mapping)
    assert sparsities(net) == [0, 0, 0]


def test_one_ramp_for_each_group_of_layers():
    net = named_model()
    ramps = [bg.SparsityRamp(net, 0.5, 0, 2, layers="a"), bg.SparsityRamp(net, 0.75, 0, 3, layers="b")]
    for ramp in ramps:
        ramp.step()
    assert sparsities(net) == [0.25, 0.25, 0.25]
    for ramp in ramps:
        ramp.step()
    assert sparsities(net) == [0.5, 0.5, 0.5]
    with raises_blockgate("name pattern"):
        bg.SparsityRamp(net, 0.5, 0, 2, layers="z")


def coarse() -> nn.Module:
    """Rows of 4 and of 10 blocks."""
    return nn.Sequential(
        bg.DynamicSparseLinear(16, 8, block_size=4, sparsity=0.0),
        bg.DynamicSparseLinear(40, 16, block_size=4, sparsity=0),
    )


def test_a_level_that_whole_blocks_cannot_meet_is_told():
    message = (
        "1 of 2 gates can't reach the sparsity that was asked for, since only whole blocks open: "
        "sparsity 0.9 closes 75.0% of 2x4 blocks. Take thinner blocks"
    )
    with pytest.warns(BlockgateWarning, match=re.escape(message)):
        bg.set_sparsity(coarse(), 0.9)
    with pytest.warns(BlockgateWarning, match=re.escape(message)):
        ramp = bg.SparsityRamp(coarse(), 0.9, 2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            ramp.step()
        bg.set_sparsity(coarse(), 0.5)


def test_an_optimizer_made_before_the_gates_is_told():
    def first_step(late: bool):
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        early = torch.optim.SGD(net.parameters(), lr=0.1)
        bg.sparsify_(net, block_size=2, filter_fn=lambda *_: True)
        ramp = bg.SparsityRamp(net, 0.5, 0, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1) if late else early
        net(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        ramp.step()
        return ramp

    with pytest.warns(BlockgateWarning, match="the optimizer trains the model but none of its gates"):
        ramp = first_step(late=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ramp.step()
        first_step(late=True)


def watchers() -> int:
    """Hooks on all optimizers that ramps have left; those of other tests may wait for the collector."""
    gc.collect()
    hooks = _global_optimizer_post_hooks.values()
    return sum("_note_training" in hook.__qualname__ for hook in hooks)


def trained_once(ramp: bg.SparsityRamp) -> None:
    net = ramp.model
    net(torch.randn(4, net[0].in_features)).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()


def test_a_ramp_stops_watching_optimizers_once_it_has_seen_one():
    before = watchers()
    ramp = bg.SparsityRamp(model(), 0.5, 0, 4)
    assert watchers() == before + 1
    ramp.step()  # before training: nothing to see yet
    assert watchers() == before + 1
    torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).step()  # of another model
    ramp.step()
    assert watchers() == before + 1
    trained_once(ramp)
    ramp.step()
    assert watchers() == before


def test_a_ramp_that_is_gone_leaves_no_hook():
    before = watchers()
    ramp = bg.SparsityRamp(model(), 0.5, 0, 4)
    copied = copy.deepcopy(ramp)
    assert watchers() == before + 1
    del ramp
    assert watchers() == before
    copied.step()


def test_gates_that_are_frozen_on_purpose_are_no_reason_to_warn():
    net = model()
    for layer in net:
        layer.gate.requires_grad_(False)
    ramp = bg.SparsityRamp(net, 0.5, 0, 4)
    net(torch.randn(4, 8)).sum().backward()
    torch.optim.SGD([layer.weight for layer in net], lr=0.1).step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ramp.step()
