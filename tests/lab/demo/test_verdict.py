"""The headline of the demo with numbers made by hand: a quiet machine, a busy one, and a starved way of torch."""

from __future__ import annotations

import copy
import dataclasses
import os
import re

import pytest

from blockgate.inspect.timing import Timing
from blockgate.lab.demo import timing
from blockgate.lab.demo.charts import speed_chart
from blockgate.lab.demo.page import results_table
from blockgate.lab.demo.timing import busy_reason
from blockgate.lab.demo.verdict import UNRELIABLE, quality_sentence, speed_sentence, times
from tests.lab.demo.test_demo import read

RATIO = re.compile(r"\d(?:\.\d+)?(?:e-?\d+)?x")
MICROSECONDS = {
    ("dense", "torch fp32"): 1200,
    ("dense", "torch int8"): 500,
    ("dense", "blockgate fp32"): 600,
    ("dense", "blockgate int8"): 400,
    ("dynamic-90", "blockgate fp32"): 300,
    ("dynamic-90", "blockgate int8"): 200,
}


def numbers(changed=None, busy=None):
    """What a demo finds, with times in microseconds that may be changed."""
    found = MICROSECONDS | (changed or {})
    best = min(found[key] for key in found if key[0] == "dense")
    arms = [
        {"name": "dense", "density": 1.0, "macs": 1000, "test_perplexity": 100.0},
        {"name": "dynamic-90", "density": 0.1, "macs": 250, "test_perplexity": 104.0},
    ]
    speeds = [
        {
            "model": model,
            "label": model,
            "engine": engine,
            "test_perplexity": 100.0,
            "macs": 1000,
            "seconds": us * 1e-6,
            "p10": us * 0.9e-6,
            "p90": us * 1.1e-6,
            "tokens_per_second": 1e6 / us,
            "speedup": best / us,
        }
        for (model, engine), us in found.items()
    ]
    return {"arms": arms, "speeds": speeds, "busy": busy}


def layers(speedup=2.0):
    points = [
        {"engine": engine, "density": d, "speedup": speedup, "speedup_over_packed_dense": speedup}
        for d in (1.0, 0.1)
        for engine in ("blockgate int8", "blockgate fp32")
    ]
    return {"points": points}


def test_a_quiet_machine_gets_ratios_to_the_fastest_dense_way():
    said = speed_sentence(numbers())
    assert "(blockgate int8) runs at 2.00x the speed of the fastest dense one (blockgate int8)" in said
    assert "In float32 it runs at 2.00x the speed of the fastest dense one (blockgate fp32)" in said
    assert "10% of the recurrent weights open" in quality_sentence(numbers())
    assert "25% of the dense" in quality_sentence(numbers())


def test_a_starved_torch_changes_nothing():
    starved = numbers({("dense", "torch fp32"): 100_000})
    assert speed_sentence(starved) == speed_sentence(numbers())
    last = results_table(starved).splitlines()
    assert last[-1].endswith("2.00x |")
    assert "0.004x" in results_table(starved)
    assert "0.00x" not in results_table(starved)


def test_a_faster_rival_of_another_make_becomes_the_baseline():
    found = numbers({("dense", "ONNX Runtime int8"): 100})
    assert "0.50x the speed of the fastest dense one (ONNX Runtime int8)" in speed_sentence(found)
    assert "In float32 it runs at 2.00x" in speed_sentence(found)


@pytest.mark.parametrize("show", [speed_sentence, results_table, lambda found: speed_chart(layers(), found["busy"])])
def test_a_busy_machine_gets_no_ratio(show):
    found = numbers(busy="other processes used 1.3 of 2 cores")
    shown = show(found)
    assert not RATIO.search(shown.replace("360x", ""))
    assert "busy" in shown
    assert RATIO.search(show(numbers()))


def test_the_chart_of_a_busy_machine_says_why():
    page = read(speed_chart(layers(), "other processes used 1.3 of 2 cores"))
    assert page.words == [UNRELIABLE, "other processes used 1.3 of 2 cores"]
    assert UNRELIABLE in page.pictures[0]


def steady(median=1e-3, spread=1.2):
    p10 = median / spread**0.5
    return Timing(median=median, p10=p10, p90=p10 * spread, p99=p10 * spread, calls=100)


@pytest.mark.parametrize(
    ("others", "threads", "spread", "busy"),
    [
        (0.1, 2, 1.2, None),
        (None, 2, 1.2, None),
        (0.3, 2, 1.2, "other processes used 0.3 of 2 cores"),
        (0.9, 1, 1.2, None),  # the core that the models leave idle
        (1.3, 1, 1.2, "other processes used 1.3 of 2 cores"),
        (0.0, 2, 2.1, "slow calls took 2.1 times as long as fast ones"),
    ],
)
def test_when_times_are_unreliable(others, threads, spread, busy, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert busy_reason(others, threads, [steady(), steady(spread=spread)]) == busy


def test_every_dense_way_is_a_rival_and_no_other():
    dense, gated = timing.DemoArm("dense", "dense", None), timing.DemoArm("dynamic-90", "dynamic, 90%", 0.9)
    assert all(timing.Way(arm=dense, engine=engine).rival for engine in ("torch int8", "blockgate int8"))
    assert not timing.Way(arm=gated, engine="blockgate int8").rival


def test_a_round_that_stands_out_shows_in_its_median():
    rounds = [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [5.0, 5.0, 5.0]]
    summary = Timing.of(copy.deepcopy(rounds))
    assert summary.rounds == (1.0, 1.0, 5.0)
    assert summary.spread == 5.0
    assert dataclasses.asdict(summary)["rounds"] == (1.0, 1.0, 5.0)


@pytest.mark.parametrize(
    ("ratio", "text"), [(194.871, "194.87x"), (1.0, "1.00x"), (0.123, "0.12x"), (0.0042, "0.0042x")]
)
def test_no_ratio_is_shown_as_nothing(ratio, text):
    assert times(ratio) == text
