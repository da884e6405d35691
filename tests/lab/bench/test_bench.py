"""The measuring itself: arms, checks and reports at toy size. No test looks at how long anything took."""

from __future__ import annotations

import itertools
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from blockgate.cli import main
from blockgate.cli.sizes import parse_shape
from blockgate.inspect import timing
from blockgate.lab.bench import checks, linear, report, targets, training
from tests.helpers import raises_blockgate

SMALL = linear.LinearCase(out_features=64, in_features=48, batch=3, block=16, key=16)


def test_timing_summary_by_hand():
    summary = timing.Timing.of([[float(n) for n in range(1, 51)], [float(n) for n in range(51, 101)]])
    assert (summary.median, summary.p10, summary.p90, summary.p99, summary.calls) == (50.5, 11.0, 91.0, 100.0, 100)


def test_arms_take_turns():
    order = []
    timing.interleave({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, seconds=0.01)
    changes = sum(x != y for x, y in itertools.pairwise(order))
    assert changes >= 15


@pytest.mark.parametrize("cold", [False, True])
def test_a_case_has_all_arms_with_their_densities(cold, monkeypatch):
    monkeypatch.setattr(timing, "cache_bytes", lambda: 1 << 16)
    monkeypatch.setattr(timing, "_eviction", [])
    case = linear.LinearCase(out_features=64, in_features=48, block=16, key=16, cold=cold)
    result = linear.run_linear(case, seconds=0.001)
    names = [arm.name for arm in result.arms]
    for name in ("torch fp32", "blockgate fp32 50%", "blockgate bf16 75%", "blockgate int8 90%", "torch CSR 90%"):
        assert name in names
    by_name = {arm.name: arm for arm in result.arms}
    assert by_name["blockgate fp32 50%"].density == 0.5
    assert by_name["blockgate fp32 0%"].density == 1.0
    packed = [by_name[f"blockgate {kind}, dense"] for kind in ("fp32", "bf16", "int8")]
    assert [arm.weight_bytes for arm in packed] == [64 * 48 * size for size in (4, 2, 1)]
    assert all(arm.density == 1.0 and not arm.rival for arm in packed)
    assert result.speedup(by_name["torch fp32"]) == 1.0
    assert json.loads(json.dumps(result.to_dict()))["case"]["block"] == 16


def test_a_wrong_result_is_never_timed(monkeypatch):
    monkeypatch.setattr(linear, "by_reference", lambda _: lambda x: torch.ones(x.shape[0], 64))
    with raises_blockgate("bench: expected blockgate fp32 0% to be right before timing it"):
        linear.run_linear(SMALL, seconds=0.001)


def test_gates_that_open_other_blocks_than_asked_are_never_timed():
    layer = linear.dynamic_layer(SMALL, 0.5)
    assert checks.require_density(layer.gates(torch.randn(3, 48)), layer.gate, "this") == 0.5
    with raises_blockgate("expected this to open 0.5000 of its blocks before timing it, got 0.0000"):
        checks.require_density(torch.zeros(3, 4, 3), layer.gate, "this")


def test_training_of_margins_with_thin_blocks_is_measured_without_memory():
    case = linear.LinearCase(
        out_features=64, in_features=48, batch=3, block=(32, 8), key=16, gate="margin", cpu_time=True
    )
    result = training.run_training(case, seconds=0.001, memory=False)
    assert "64x48, batch 3, block 32x8, key 16, gate margin, " in result.to_dict()["case"]["title"]
    assert result.memory == {}
    assert set(result.timings) == {linear.DENSE, *(training.arm_name(s) for s in case.sparsities)}


def test_training_measures_time_and_memory():
    case = linear.LinearCase(out_features=1024, in_features=1024, batch=8, sparsities=(0.5,))
    result = training.run_training(case, seconds=0.001)
    assert set(result.timings) == set(result.memory) == {"torch fp32", "blockgate fp32 50%"}
    # At least the weight and its gradient, but for memory that the first, small layer has left to use again.
    assert min(result.memory.values()) > 0.9 * 2 * 1024 * 1024 * 4


def test_every_target_has_a_floor_for_each_sparsity():
    for target in targets.TARGETS:
        assert len(target.floors) == len(target.sparsities)
        assert all(floor > 0 for floor in target.floors)
    result = targets.TargetResult(
        target=targets.TARGETS[0], speedups=[1.9, 3.4, 7.4], cold_speedups=None, dense_seconds=1.0
    )
    assert not result.met


def test_a_target_has_the_dense_layer_packed_alike(monkeypatch):
    monkeypatch.setattr(timing, "cache_bytes", lambda: 1 << 16)
    monkeypatch.setattr(timing, "_eviction", [])
    target = targets.Target(
        work="toy", out_features=64, in_features=48, block=16, key=16, dtype=torch.int8, floors=(1, 1, 1)
    )
    result = targets.run_target(target, seconds=0.001)
    assert len(result.speedups) == len(result.cold_speedups) == 3
    assert result.to_dict()["packed_dense_speedup"] == result.packed_dense > 0
    row = report.targets_markdown([result]).splitlines()[-1]
    assert f"| toy | {result.dense_seconds * 1e3:.3f} | {result.packed_dense:.2f}x |" in row


def test_the_command_writes_its_report_and_prints_json(tmp_path, capsys):
    flags = ["--shapes", "64x48", "--batches", "1", "--block", "16", "--key", "16", "--seconds", "0.001"]
    assert main(["bench", "linear", *flags, "--no-static", "--output", str(tmp_path / "r"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "r.json").read_text())
    text = (tmp_path / "r.md").read_text()
    assert "| blockgate fp32 90% |" in text
    assert "threads" in text
    assert (tmp_path / "r.png").stat().st_size > 1000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.json", "r.md", "r.png"]


def test_bad_flags_are_one_clear_line(capsys):
    assert main(["bench", "linear", "--shapes", "64by48"]) == 2
    assert "--shapes: expected OUTxIN such as 6144x1536, got '64by48'" in capsys.readouterr().err
    assert main(["bench", "targets", "--only", "no such line"]) == 2
    for flags in (["--threads", "0"], ["--threads", "100000000"], ["--seconds", "nan"], ["--sparsities", "1.0"]):
        assert main(["bench", *flags]) == 2
    for flags in (
        ["--batches", "0"],
        ["--batches"],
        ["--shapes", "9999999x9999999"],
        ["--block", "0"],
        ["--block", "16by4"],
        ["--cpu-time", "--training"],
    ):
        assert main(["bench", "linear", *flags]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert parse_shape("6144x1536") == (6144, 1536)


def test_block_sizes_are_measured_with_all_arms(tmp_path, monkeypatch, capsys):
    """The script behind the picture of docs/block-size.md."""
    script = Path(__file__).parents[3] / "benchmarks" / "block_size.py"
    command = [str(script), "--shape", "256x128", "--seconds", "0.001", "--output", str(tmp_path / "made")]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(timing, "cache_bytes", lambda: 1 << 16)
    monkeypatch.setattr(timing, "_eviction", [])
    runpy.run_path(str(script), run_name="__main__")
    data = json.loads((tmp_path / "made.json").read_text())
    arms = {entry["arm"]: entry for entry in data["results"]}
    assert {"torch fp32", "packed dense", "block 32, key 64", "block 128, key all"} <= arms.keys()
    # 32 blocks of 32x32, of which 3 are open, and a gate of 64 features for each block.
    assert arms["block 32, key 64"]["mac_share"] == pytest.approx(3 / 32 + 64 / 32**2)
    assert data["load"] >= 0
    assert (tmp_path / "made.md").read_text() in capsys.readouterr().out
