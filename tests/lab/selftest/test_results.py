"""The table of docs/reliability.md has the numbers of its result files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RESULTS, PAGE = ROOT / "benchmarks" / "results", (ROOT / "docs" / "reliability.md").read_text()
SETS = ("avx512vnni", "avx512", "avx2", "baseline")


def totals(name):
    return json.loads((RESULTS / f"selftest_epyc-{name}.json").read_text())["total"]


def table():
    """Cells by the name of their line."""
    _, _, rest = PAGE.partition("<!-- made from benchmarks/results/selftest_epyc-every-set.json")
    lines = [line.strip("| ").split(" | ") for line in rest.split("\n\n")[0].splitlines()[3:]]
    return {name: cells for name, *cells in lines}


@pytest.mark.parametrize("what", ["problems", "comparisons", "differences", "near ties", "undetermined numbers"])
def test_counts_are_those_of_the_file(what):
    key = {"near ties": "near_ties", "undetermined numbers": "undetermined"}.get(what, what)
    assert table()[what] == [f"{totals('every-set')[isa][key]:,}" for isa in SETS]


def test_worst_errors_are_those_of_the_file():
    worst = {name[13:]: cells for name, cells in table().items() if name.startswith("worst error, ")}
    assert len(worst) > 10
    for kind, cells in worst.items():
        assert cells == [f"{totals('every-set')[isa]['worst'][kind]:.2f}" for isa in SETS]


def test_earlier_commits_are_added():
    both = [f"{totals('every-set')[isa]['comparisons'] + totals('portions')[isa]['comparisons']:,}" for isa in SETS]
    assert table()["with the earlier commits"] == both


def test_deliberate_faults_are_counted():
    found = json.loads((RESULTS / "mutants_epyc.json").read_text())
    by = [fault["by"] for fault in found["faults"].values()]
    assert sum(found["tried"].values()) == len(by)
    assert sum(found["caught"].values()) == sum(map(bool, by))
    for kind, where in (("native", "in native code"), ("python", "in Python")):
        assert f"{found['tried'][kind]} {where}, of which {found['caught'][kind]} were caught" in " ".join(PAGE.split())


def test_memory_over_time_is_that_of_the_file():
    found = json.loads((RESULTS / "soak_epyc-curves.json").read_text())
    _, _, rest = PAGE.partition("<!-- made from benchmarks/results/soak_epyc-curves.json -->\n")
    head, _, *lines = [line.strip("| ").split(" | ") for line in rest.split("\n\n")[0].splitlines()]
    times = [float(cell.removesuffix(" s")) for cell in head[1:]]
    for kind, line in zip(("gated", "dense"), lines, strict=True):
        curve = found[kind]["megabytes"]
        nearest = [min(curve, key=lambda point: abs(point[0] - at))[1] for at in times]
        assert line[1:] == [str(round(size)) for size in nearest]
