"""Training time to given perplexities: worked out by hand, and as a table and a picture of made-up results."""

from __future__ import annotations

import math

import pytest

from blockgate.lab.reproduce import Arm, Order, reproduce
from blockgate.lab.reproduce.order import write_up
from blockgate.lab.reproduce.pace import Mark, draw_pace, pace_section, time_to
from tests.helpers import raises_blockgate

DENSE, BARE, GATED = (
    Arm("ptb-medium", kind, percent)
    for kind, percent in (("dense", None), ("dense-no-dropout", None), ("margin-no-dropout", 75))
)
MACHINE = {"cpu": "Test CPU", "torch": "2.99", "commit": "abc", "threads": 1, "instruction set": "avx2"}


def result(arm, seed, seconds, scores, *, layers=2000, gates=0, cpu=True):
    rows = [
        {"epoch": number, "seconds": spent, "valid_perplexity": score} | ({"cpu_seconds": spent / 2} if cpu else {})
        for number, (spent, score) in enumerate(zip(seconds, scores, strict=True), start=1)
    ]
    costs = {"macs": 3000, "matrix_macs": layers, "matrix_macs_dense": 2000, "gate_macs": gates}
    return {
        "arm": arm.name,
        "seed": seed,
        "run": {"epochs": len(rows), "seed": seed},
        "machine": MACHINE,
        "valid": {"perplexity": scores[-1]},
        "test": {"perplexity": scores[-1] - 5},
        "gates": {},
        "costs": costs | {"parameters": 5000, "zeros": 0},
        "epochs": rows,
    }


RESULTS = {
    DENSE.name: [result(DENSE, 1, [600, 600, 600], [200.0, 100.0, 90.0])],
    BARE.name: [result(BARE, 1, [600, 600, 600], [180.0, 120.0, 110.0])],
    GATED.name: [
        result(GATED, 1, [300, 300, 300], [160.0, 100.0, 95.0], layers=700, gates=180),
        result(GATED, 2, [300, 300, 300], [140.0, 120.0, 100.0], layers=700, gates=180),
    ],
}
ARMS = [DENSE, BARE, GATED, Arm("ptb-medium", "agp", 90)]


def test_the_time_to_a_level_lies_between_two_epochs():
    marks = [Mark(100, 200.0), Mark(200, 100.0), Mark(300, 120.0), Mark(400, 50.0)]
    assert time_to(100.0, marks) == 200
    assert time_to(200 / math.sqrt(2), marks) == pytest.approx(150)
    # The end of the first epoch is the first that is known.
    assert time_to(300.0, marks) == 100
    assert time_to(60.0, marks) == pytest.approx(300 + 100 * math.log(2) / math.log(120 / 50))
    assert time_to(49.0, marks) is None
    assert time_to(49.0, []) is None


def rows_of(text):
    lines = [line for line in text.splitlines() if line.startswith("| ptb-medium")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_minutes_to_levels_are_compared_with_the_dense_model_that_is_first():
    text = pace_section(ARMS, RESULTS, "perplexity", [120, 100, 92])
    assert "| to 120 | to 100 | to 92 |" in text
    # To 120: dense after 10 + 10 * log(200 / 120) / log(2) = 17.37 minutes, without dropout after 20. Gated: 5 + 5 *
    # log(160 / 120) / log(1.6) = 8.06 and 10 minutes, 9.03 in the mean.
    assert rows_of(text) == [
        ["ptb-medium", "dense", "-", "100.0%", "10.0", "17.4", "20.0", "27.9"],
        ["ptb-medium", "dense, no dropout", "-", "100.0%", "10.0", "20.0", "-", "-"],
        [
            "ptb-medium",
            "margin, revived, thin blocks, no dropout",
            "75%",
            "26.0%",
            "5.0",
            "9.0 (1.92x)",
            "12.5 (1.60x)",
            "-",
        ],
    ]
    assert "Test CPU, 1 thread(s)." in text
    assert "compare with care" not in text
    assert pace_section(ARMS, {}, "perplexity", [120]) == ""


def test_other_machines_and_levels_that_only_gated_models_reach():
    elsewhere = result(BARE, 1, [600, 600], [180.0, 170.0]) | {"machine": MACHINE | {"cpu": "Other CPU"}}
    text = pace_section(ARMS, {BARE.name: [elsewhere], GATED.name: RESULTS[GATED.name]}, "perplexity", [120])
    assert [row[-1] for row in rows_of(text)] == ["-", "9.0"]
    assert "Other CPU, 1 thread(s); Test CPU, 1 thread(s)." in text
    assert "Not all arms ran on the same machine" in text


def test_the_processor_has_a_clock_of_its_own():
    text = pace_section(ARMS, RESULTS, "perplexity", [100], clock="processor")
    assert [row[-1] for row in rows_of(text)] == ["10.0", "-", "6.2 (1.60x)"]
    old = {DENSE.name: [result(DENSE, 1, [600], [200.0], cpu=False)]}
    with raises_blockgate("--clock: expected results with cpu_seconds of every epoch"):
        pace_section(ARMS, old, "perplexity", [100], clock="processor")


def test_the_picture_has_a_line_for_every_arm_and_level(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn = {}
    plot = Axes.plot

    def note(axis, x, y, *args, label, **options):
        drawn[label] = (x, y)
        return plot(axis, x, y, *args, label=label, **options)

    monkeypatch.setattr(Axes, "plot", note)
    draw_pace(ARMS, RESULTS, "perplexity", [120, 100], tmp_path / "pace.png")
    assert drawn == {
        "dense": ([10, 20, 30], [200, 100, 90]),
        "dense, no dropout": ([10, 20, 30], [180, 120, 110]),
        "margin, revived, thin blocks, no dropout, 75% (26.0% open)": ([5, 10, 15], [150, 110, 97.5]),
    }
    assert (tmp_path / "pace.png").stat().st_size > 10_000


def test_the_report_of_an_experiment_has_the_times_to_its_levels(tmp_path):
    results = {arm: found for arm, found in RESULTS.items() if arm == DENSE.name}
    text = write_up(Order(experiment="medium"), results, None, tmp_path)
    assert "| to 100 | to 95 | to 90 |" in text
    assert (tmp_path / "pace-medium-ptb-medium.png").is_file()
    assert "| to 150 |" in write_up(Order(experiment="medium", levels=(150,)), results, None, tmp_path)
    wide = {"ptb-wide-dense": [result(Arm("ptb-wide", "dense"), 1, [600], [200.0])]}
    assert "of training to" not in write_up(Order(experiment="wide"), wide, None, tmp_path)
    assert not (tmp_path / "pace-wide-ptb-wide.png").exists()


def test_levels_are_checked_before_anything_is_trained(tmp_path):
    for wrong in (0.0, -1.0, float("nan")):
        with raises_blockgate("--levels: expected positive numbers"):
            reproduce(Order(experiment="medium", scale="tiny", levels=(100.0, wrong), output=tmp_path))
