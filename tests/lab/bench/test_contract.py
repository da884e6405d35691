"""`blockgate bench contract` at toy size: its grid, its arithmetic and its words. No test looks at a time."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from blockgate.cli import main
from blockgate.formats import FORMATS
from blockgate.lab.bench import contract, machine
from blockgate.lab.bench.contract import CHECKS, Check, Outcome, busy_neighbours, contract_markdown, run_check


def outcome(ours, limit, what="packed dense int8"):
    return Outcome(what=what, rival="torch int8", ours=ours, theirs=1e-3, limit=limit)


def test_the_grid_spans_what_is_promised():
    titles = [check.title for check in CHECKS]
    assert len(set(titles)) == len(titles)
    for part in ("dense 64x64, batch 1", "dense 8192x8192, batch 1", "batch 1024", "gated int8", "crowded float32"):
        assert any(part in title for title in titles), part


@pytest.mark.parametrize(
    ("measure", "rows", "promised"),
    [
        (partial(contract._dense, 48, 32, 3), len(FORMATS), 3),
        (partial(contract._crowded, 48, 32, "int8"), 4, 1),
    ],
)
def test_a_check_holds_every_format_against_its_rival(measure, rows, promised, monkeypatch):
    monkeypatch.setattr(contract, "TAIL_CALLS", 20)
    found = run_check(Check(title="toy", measure=measure), seconds=0.001)
    assert len(found) == rows
    assert sum(o.limit is not None for o in found) == promised
    assert all(o.ours > 0 and o.theirs > 0 for o in found)


def test_advised_gates_are_held_against_the_dense_layer(monkeypatch):
    asked = []
    real = contract.advise

    def gate_all(*args, **options):
        asked.append(options["formats"])
        advice = real(*args, **options)
        first = advice.layers[0]
        object.__setattr__(first, "gate", True)
        object.__setattr__(first, "block_size", (64, 64))
        object.__setattr__(first, "key_size", 64)
        return advice

    monkeypatch.setattr(contract, "advise", gate_all)
    (found,) = run_check(Check(title="toy", measure=partial(contract._gated, 256, 256, 1, "float32")), seconds=0.001)
    assert asked == [["float32"]]
    assert found.limit == contract.GATED_LIMIT
    assert "blocks (64, 64)" in found.what


def test_violations_come_first_and_the_worst_of_them_before_the_others():
    text = contract_markdown([
        outcome(1.2e-3, 1.1),
        outcome(1e-3, 1.1),
        outcome(3e-3, 1.1, "slow"),
        outcome(9e-3, None),
    ])
    assert "**2 of 3 promises are broken**" in text
    assert text.index("slow: 3.00x the time of torch int8, promised 1.1x") < text.index("packed dense int8: 1.20x")
    assert "| 9.00x |" in text
    assert "All 1 promises are kept" in contract_markdown([outcome(1e-3, 1.1)])


def test_neighbours_end_with_the_measurement():
    def fails():
        with busy_neighbours(2) as processes:
            assert [process.poll() for process in processes] == [None, None]
            started.extend(processes)
            raise ZeroDivisionError

    started = []
    with pytest.raises(ZeroDivisionError):
        fails()
    assert all(process.poll() is not None for process in started)


def test_the_report_says_what_other_processes_used():
    others = machine.Others()
    torch.randn(100, 100).sum()
    assert str(others) == "unknown" or "cores" in str(others)


def test_the_command_prints_and_writes_and_ends_well_with_promises_broken(tmp_path, capsys, monkeypatch):
    broken = Check(title="dense toy", measure=lambda seconds: [outcome(5e-3 + 0 * seconds, 1.1)])
    monkeypatch.setattr("blockgate.cli.bench.CHECKS", (broken,))
    monkeypatch.setattr(machine, "peak_flops", lambda: 1e9)
    assert main(["bench", "contract", "--json", "--output", str(tmp_path / "contract")]) == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert (row["ratio"], row["kept"]) == (pytest.approx(5.0), False)
    assert "1 of 1 promises are broken" in (tmp_path / "contract.md").read_text()
    assert main(["bench", "contract", "--only", "nothing"]) == 2
