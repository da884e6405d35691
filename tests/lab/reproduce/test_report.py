"""The table: means and deviations, the paper's numbers beside, and empty rows for what is not done."""

from __future__ import annotations

from blockgate.lab.reproduce import Arm
from blockgate.lab.reproduce.quality import Point, draw_quality, points_of
from blockgate.lab.reproduce.report import table
from tests.helpers import raises_blockgate

DENSE, GATED, SMALL = Arm("ptb-lstm", "dense"), Arm("ptb-lstm", "dynamic", 90), Arm("ptb-lstm", "small", 90)
MACHINE = {"cpu": "Test CPU", "torch": "2.99", "commit": "abc", "threads": 1, "instruction set": "avx2"}


def result(seed, valid, test, *, macs, layers, dense_layers, gates=0, dependent=(), parameters=5000, zeros=0):
    costs = {"macs": macs, "matrix_macs": layers, "matrix_macs_dense": dense_layers, "gate_macs": gates}
    return {
        "arm": "x",
        "seed": seed,
        "run": {"epochs": 9, "seed": seed, "model": {"hidden_size": macs}},
        "valid": {"loss": 1.0, "perplexity": valid},
        "test": {"loss": 1.0, "perplexity": test},
        "gates": {f"layer {n}": {"input_dependent": share} for n, share in enumerate(dependent)},
        "costs": costs | {"parameters": parameters, "zeros": zeros},
        "machine": MACHINE,
    }


RESULTS = {
    DENSE.name: [result(1, 100.0, 90.0, macs=3000, layers=2000, dense_layers=2000)],
    GATED.name: [
        result(1, 110.0, 99.0, macs=1450, layers=450, dense_layers=2000, gates=250, dependent=(0.5, 0.75)),
        result(2, 112.0, 101.0, macs=1450, layers=450, dense_layers=2000, gates=250, dependent=(0.25, 0.5)),
    ],
}


def rows_of(text, first="| ptb-lstm"):
    """Of the first table."""
    lines = text.split("\n## ")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith(first)]


def test_rows():
    text = table("Table 2", [DENSE, GATED, SMALL], RESULTS, "laptop")
    assert rows_of(text) == [
        ["ptb-lstm", "dense", "-", "100.0%", "-", "5000", "3000", "100.0%", "100.00", "90.00", "78.57"],
        [
            "ptb-lstm",
            "dynamic, Eq. 1",
            "90%",
            "10.0%",
            "50.0%",
            "5000",
            "1450",
            "22.5%",
            "111.00 ± 1.41",
            "100.00 ± 1.41",
            "80.34",
        ],
        ["ptb-lstm", "small dense of equal MACs", "90%", "-", "-", "-", "-", "-", "-", "-", "-"],
    ]
    assert text.startswith("# Table 2, laptop scale\n")
    assert "Seeds 1, 2; the best epoch by validation. Test CPU, torch 2.99, commit abc." in text
    assert "compare rows only with each other" in text
    assert "compare rows" not in table("Table 2", [DENSE], RESULTS, "paper")


def test_scores_by_sparsity():
    half = Arm("ptb-lstm", "dynamic", 50)
    results = RESULTS | {half.name: [result(1, 1.0, 95.0, macs=1, layers=11, dense_layers=20, gates=2)]}
    text = table("Table 2", [DENSE, half, GATED, SMALL], results, "laptop")
    assert rows_of(text.split("## Test perplexity by sparsity")[1]) == [
        ["ptb-lstm", "dense", "90.00", "", ""],
        ["ptb-lstm", "dynamic, Eq. 1", "", "95.00 (45.0%)", "100.00 ± 1.41 (10.0%)"],
    ]
    assert "| task | model | dense | 50% | 90% |" in text
    assert "by sparsity" not in table("Table 2", [DENSE, GATED], RESULTS, "laptop")


def test_differences_are_taken_between_runs_of_the_same_seed():
    dense = [result(seed, 1.0, score, macs=1, layers=1, dense_layers=1) for seed, score in ((1, 90.0), (2, 95.0))]
    gated = [result(s, 1.0, t, macs=1, layers=1, dense_layers=2) for s, t in ((1, 91.0), (2, 95.5), (3, 500.0))]
    results = {DENSE.name: dense, GATED.name: gated}
    section = table("", [DENSE, GATED, SMALL], results, "laptop").split("## Against the dense model, seed by seed")[1]
    assert rows_of(section) == [
        ["ptb-lstm", "dynamic, Eq. 1", "90%", "50.0%", "100.0%", "-", "2", "+0.75 (+0.50 to +1.00)"],
    ]
    assert "Against" not in table("", [DENSE, SMALL], {DENSE.name: dense}, "laptop")
    plain, ramp = Arm("ptb-lstm", "plain", 75), Arm("ptb-lstm", "ramp", 75)
    results = {plain.name: dense, ramp.name: gated[:1]}
    section = table("", [DENSE, plain, ramp], results, "laptop").split("## Against the plain model, seed by seed")[1]
    assert [row[-2:] for row in rows_of(section)] == [["1", "+1.00"]]


def test_small_dense_layers_are_compared_with_the_dense_ones():
    small = {SMALL.name: [result(1, 120.0, 110.0, macs=1500, layers=500, dense_layers=500)]}
    assert rows_of(table("", [DENSE, SMALL], RESULTS | small, "laptop"))[1][7] == "25.0%"
    assert rows_of(table("", [DENSE, SMALL], small, "laptop"))[1][7] == "-"


def test_results_of_different_recipes_are_not_mixed():
    other = result(1, 110.0, 99.0, macs=1450, layers=450, dense_layers=2000)
    other["run"]["epochs"] = 10
    with raises_blockgate(
        "results of ptb-lstm: expected the recipe of x, seed 1, got 'ptb-lstm-dynamic-90, seed 1, with"
    ):
        table("", [DENSE, GATED], RESULTS | {GATED.name: [other]}, "laptop")


def test_gates_may_learn_at_a_rate_of_their_own():
    slow = Arm("ptb-lstm", "dynamic-slow", 50)
    own = result(1, 110.0, 99.0, macs=1450, layers=450, dense_layers=2000)
    own["run"]["optimizer"] = {"gate_lr": 0.001}
    dense = result(1, 110.0, 99.0, macs=1450, layers=450, dense_layers=2000)
    dense["run"]["optimizer"] = {"gate_lr": None}
    assert len(rows_of(table("", [DENSE, slow], {DENSE.name: [dense], slow.name: [own]}, "laptop"))) == 2


def test_pruned_parameters_are_not_counted():
    agp = Arm("ptb-lstm", "agp", 90)
    pruned = [result(1, 1.0, 1.0, macs=1200, layers=200, dense_layers=2000, zeros=1800)]
    row = rows_of(table("", [agp], {agp.name: pruned}, "laptop"))[0]
    assert row[3:8] == ["10.0%", "-", "3200", "1200", "10.0%"]


def test_errors_of_image_networks_are_percentages():
    arm = Arm("mnist", "dynamic", 90)
    images = result(1, 0.0, 0.0, macs=10, layers=5, dense_layers=10) | {"valid": {"error": 0.0213}}
    images["test"] = {"error": 0.0199}
    row = rows_of(table("MNIST", [arm], {arm.name: [images]}, "paper"), "| mnist")[0]
    assert row[-3:] == ["2.13%", "1.99%", "about 2%"]


def test_nothing_done_yet():
    text = table("Table 2", [DENSE], {}, "laptop")
    assert "No arm is done yet" in text
    assert rows_of(text) == [["ptb-lstm", "dense", *["-"] * 8, "78.57"]]


def test_times():
    seconds = {"float32": {"model": {"median": 1.23e-4}, "layers": {"median": 2.5e-5}}}
    times = {"machine": MACHINE, "seconds": {GATED.name: seconds}}
    text = table("Table 2", [DENSE, GATED], RESULTS, "laptop", times)
    row = rows_of(text.split("## Time per token")[1].split("## Quality")[0])[-1]
    assert row == ["ptb-lstm", "dynamic, Eq. 1", "90%", "10.0%", "123.0", "25.0"]
    assert "Medians on Test CPU, 1 thread(s), avx2" in text


def timed(**microseconds):
    return {engine: {"model": {"median": us * 1e-6}} for engine, us in microseconds.items()}


def test_quality_at_equal_time(tmp_path):
    pruned = {percent: Arm("ptb-lstm", "agp", percent) for percent in (50, 90)}
    better = Arm("ptb-lstm", "small-no-dropout", 90)
    costs = {"macs": 1, "layers": 1, "dense_layers": 1}
    results = RESULTS | {
        pruned[50].name: [result(1, 0, 80.0, **costs)],
        pruned[90].name: [result(1, 0, 95.0, **costs)],
        SMALL.name: [result(1, 0, 120.0, **costs)],
        better.name: [result(1, 0, 110.0, **costs)],
    }
    times = {
        "machine": MACHINE,
        "seconds": {
            DENSE.name: timed(torch=50, float32=40),
            GATED.name: timed(float32=30, int8=20),
            pruned[50].name: timed(float32=40, CSR=21),
            pruned[90].name: timed(float32=40, CSR=20),
            SMALL.name: timed(float32=10),
            better.name: timed(float32=11),
        },
        # The first seed loses 2 by packing, so the mean of both does.
        "quality": {GATED.name: {"float32": 99.0, "int8": 101.0}},
    }
    arms = [DENSE, GATED, *pruned.values(), SMALL, better]
    text = table("Table 2", arms, results, "laptop", times)
    rows = rows_of(text.split("## Quality at equal time")[1])
    assert rows == [
        [
            "ptb-lstm",
            "dynamic, Eq. 1, 90% (10.0% open)",
            "20.0 (int8)",
            "102.00",
            "90% (100.0% open): 95.00 in 20.0 (CSR)",
            "90%, no dropout: 110.00 in 11.0 (float32)",
            "none",
        ]
    ]
    # Ablations have no look of their own: they are left out.
    points = [*points_of(arms, results, times, "perplexity"), Point(Arm("ptb-lstm", "plain", 75), "int8", 1e-5, 90.0)]
    draw_quality(points, "perplexity", tmp_path / "quality.png")
    assert (tmp_path / "quality.png").stat().st_size > 10_000
