"""Experiments from end to end at the tiny scale: complete, resumable, stoppable, and clear about what is wrong."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from blockgate.cli import main
from blockgate.errors import BlockgateError
from blockgate.lab.reproduce import Arm, Order, arms_of, reproduce, run_of
from blockgate.lab.reproduce.clusters import LocalCluster, SlurmOptions, make_cluster
from blockgate.lab.reproduce.jobs import Job, check_done
from blockgate.lab.reproduce.results import RESULT, load_result
from blockgate.lab.reproduce.sweep import run_jobs
from blockgate.lab.reproduce.tiny import tiny_run
from blockgate.lab.reproduce.worker import FAILED, Arms
from blockgate.lab.training import shipped_configs
from blockgate.lab.training.config import run_to_plain
from tests.helpers import raises_blockgate


def results_in(folder):
    return {file.parent.parent.name: json.loads(file.read_text()) for file in folder.glob(f"*/seed-1/{RESULT}")}


def without_times(result):
    rows = [{name: value for name, value in row.items() if "second" not in name} for row in result["epochs"]]
    run = {name: value for name, value in result["run"].items() if name not in {"output", "resume", "data"}}
    return result | {"epochs": rows, "run": run, "machine": None}


@pytest.fixture(scope="module")
def table2(tmp_path_factory):
    """The whole table, trained and timed."""
    output = tmp_path_factory.mktemp("table2")
    reproduce(Order(experiment="table2", scale="tiny", output=output, time=True))
    return output


@pytest.mark.slow
def test_table2_from_end_to_end(table2):
    results = results_in(table2 / "tiny")
    assert set(results) == {arm.name for arm in arms_of("table2", "tiny")}
    for name, result in results.items():
        assert result["seed"] == 1
        assert {"run", "machine", "epoch", "valid", "test", "costs", "gates"} <= result.keys()
        assert {"cpu", "torch", "commit", "python"} <= result["machine"].keys()
        assert len(result["epochs"]) == result["run"]["epochs"]
        # Knowing nothing of 42 words would give 42; there is time to learn a little.
        assert result["test"]["perplexity"] < 41, name
    assert results["ptb-lstm-dense"]["test"]["perplexity"] < 35
    costs = {name: result["costs"] for name, result in results.items()}
    whole = costs["ptb-lstm-dense"]["matrix_macs"]
    assert costs["ptb-lstm-agp-90"]["matrix_macs"] == pytest.approx(0.1 * whole, rel=0.01)
    assert costs["ptb-lstm-static-50"]["matrix_macs"] == 0.5 * whole
    gated = costs["ptb-lstm-dynamic-75"]
    assert 0 < gated["matrix_macs"] - gated["gate_macs"] <= 0.25 * whole
    report = (table2 / "tiny" / "table2.md").read_text()
    for line in ("| ptb-lstm | dynamic, Eq. 1 | 90% |", "| wikitext-2-lstm | AGP of whole blocks | 90% |"):
        assert report.count(line) == 4  # in the table, in that of differences, and in those of times
    assert "## Quality at equal time" in report
    times = json.loads((table2 / "tiny" / "times-table2.json").read_text())
    for name, result in results.items():
        measured = times["quality"][name]
        assert measured["bfloat16"] == pytest.approx(result["test"]["perplexity"], rel=0.05)
        assert measured["int8"] == pytest.approx(result["test"]["perplexity"], rel=0.1)
        assert measured["int4"] == pytest.approx(result["test"]["perplexity"], rel=0.2)
    for picture in ("quality-table2-wikitext-2-lstm.png", "curves-table2-ptb-lstm.png"):
        assert (table2 / "tiny" / picture).stat().st_size > 10_000


@pytest.mark.slow
def test_ablations_that_need_more_than_an_option(tmp_path):
    kinds = ("dense", "ramp-75", "softmax-sum-75", "sigmoid-75", "balance-75", "from-dense-75", "distilled-75")
    arms = tuple(f"ptb-ablation-{kind}" for kind in kinds)
    text = reproduce(Order(experiment="ablations", scale="tiny", arms=arms, jobs=1, output=tmp_path)).read_text()
    results = results_in(tmp_path / "tiny")
    assert set(results) == set(arms)
    densities = {gate["measured_density"] for gate in results["ptb-ablation-sigmoid-75"]["gates"].values()}
    assert densities == {1.0}
    # What starts from a trained model is ahead from its first epoch on.
    first = {name: result["epochs"][0]["valid_perplexity"] for name, result in results.items()}
    for kind in ("from-dense", "distilled"):
        assert first[f"ptb-ablation-{kind}-75"] < 0.9 * first["ptb-ablation-ramp-75"]
    assert "| ptb-ablation | balance loss of 0.01 | 75% |" in text


@pytest.mark.slow
def test_results_and_lists_as_json(table2, capsys):
    command = [
        "reproduce",
        "table2",
        "--scale",
        "tiny",
        "--output",
        str(table2),
        "--arms",
        "ptb-lstm-dynamic-*",
        "--json",
    ]
    assert main(command) == 0
    printed = json.loads(capsys.readouterr().out)
    expected = {name: result for name, result in results_in(table2 / "tiny").items() if "ptb-lstm-dynamic" in name}
    assert {result["arm"]: result for result in printed["results"]} == expected
    assert printed["report"] == str(table2 / "tiny" / "table2.md")
    assert main([*command, "--list"]) == 0
    assert [arm["name"] for arm in json.loads(capsys.readouterr().out)] == [
        arm.name for arm in arms_of("table2", "tiny") if arm.name in expected
    ]


@pytest.mark.slow
def test_a_second_call_finds_everything_done(table2):
    def written():
        return {file: file.stat().st_mtime_ns for file in table2.glob(f"tiny/*/*/{RESULT}")}

    before = written()
    text = reproduce(Order(experiment="table2", scale="tiny", output=table2)).read_text()
    assert before == written()
    assert "## Time per token" in text


@pytest.mark.slow
def test_an_interrupted_experiment_goes_on_and_ends_the_same(table2, tmp_path):
    arms = ("ptb-lstm-dynamic-90", "ptb-lstm-agp-90")
    words = ["reproduce", "table2", "--scale", "tiny", "--arms", *arms, "--output", str(tmp_path)]
    with subprocess.Popen([sys.executable, "-m", "blockgate", *words], stderr=subprocess.PIPE, text=True) as process:
        # Ctrl-C in the middle of the first arms.
        while not list(tmp_path.glob("tiny/*/seed-1/run.json")) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        errors = process.communicate()[1]
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "blockgate: interrupted"
    assert len(results_in(tmp_path / "tiny")) < 2
    assert not list(tmp_path.glob(f"tiny/*/seed-1/{FAILED}"))
    reproduce(Order(experiment="table2", scale="tiny", output=tmp_path, arms=arms))
    found, expected = results_in(tmp_path / "tiny"), results_in(table2 / "tiny")
    assert set(found) == set(arms)
    for name in arms:
        assert without_times(found[name]) == without_times(expected[name])


@pytest.mark.slow
def test_figure2_draws_every_model_and_keeps_those_of_earlier_calls(table2):
    arms = ["ptb-lstm-dynamic-50", "ptb-lstm-dynamic-best-75"]
    for arm in arms:
        text = reproduce(Order(experiment="figure2", scale="tiny", output=table2, arms=[arm])).read_text()
    shares = json.loads((table2 / "tiny" / "figure2.json").read_text())
    assert list(shares) == arms
    for of_model in shares.values():
        for share in of_model.values():
            assert 0 < share.pop("density") <= 1
            assert sum(share.values()) == pytest.approx(1)
    assert all(f"| {arm} | layers.0.ih_l0 |" in text for arm in arms)
    assert all((table2 / "tiny" / f"figure2-{arm}.png").is_file() for arm in arms)


@pytest.mark.slow
def test_mnist_and_its_figure_share_their_arms(tmp_path, capsys):
    report = reproduce(Order(experiment="mnist", scale="tiny", output=tmp_path)).read_text()
    assert "| mnist | dynamic, rms + per row | 90% |" in report
    # 8 classes.
    assert all(result["test"]["error"] < 0.7 for result in results_in(tmp_path / "tiny").values())
    capsys.readouterr()
    assert main(["reproduce", "figure1", "--scale", "tiny", "--output", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "| mnist-dynamic-90 | layers.3 |" in out
    assert "[1/" not in err
    assert (tmp_path / "tiny" / "figure1-mnist-dynamic-90.png").stat().st_size > 1000


@pytest.fixture
def job(tmp_path):
    """An arm that takes a second or two."""
    base = tiny_run(shipped_configs()["ptb-lstm-laptop"], tmp_path / "data")
    arm = Arm("ptb-lstm", "dense")
    run = replace(run_of(arm, base), output=tmp_path / arm.name, epochs=1, threads=1, accelerator="cpu")
    return Job(arm.name, run)


def worker_runs(job):
    Arms(((job.arm, run_to_plain(job.run)),))()


def test_a_failed_arm_says_why_and_is_tried_again(job, tmp_path):
    (job.run.output / "last.pt").mkdir(parents=True)  # no checkpoint can be written there
    worker_runs(job)
    assert job.has_failed
    assert "Traceback" in (job.run.output / "log.txt").read_text()
    with pytest.raises(
        BlockgateError, match=r"ptb-lstm-dense, seed 1 failed: .*log\.txt; the same command tries again"
    ):
        check_done([job], tmp_path)
    (job.run.output / "last.pt").rmdir()
    worker_runs(job)
    assert not job.is_done  # it is left alone until somebody asks for it again
    (job.run.output / FAILED).unlink()
    worker_runs(job)
    check_done([job], tmp_path)
    assert load_result(job.run.output, job.run)["arm"] == "ptb-lstm-dense"
    # The result of another recipe is not taken for this one's.
    with raises_blockgate("expected the result of the run that is asked for, got 'batch_size: 10 -> 20'"):
        load_result(job.run.output, replace(job.run, batch_size=20))


def test_workers_leave_arms_alone_that_others_are_at(job, tmp_path):
    job.run.output.mkdir(parents=True)
    with (job.run.output / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        worker_runs(job)
    assert [file.name for file in job.run.output.iterdir()] == [".lock"]
    with raises_blockgate("got none of ptb-lstm-dense, seed 1. Their processes ended early: see"):
        check_done([job], tmp_path)


def test_a_call_waits_for_arms_that_another_call_is_at(job, tmp_path):
    cluster = LocalCluster(tmp_path / ".jobs", at_once=1, threads=1)
    job.run.output.mkdir(parents=True)
    held = (job.run.output / ".lock").open("w")
    fcntl.flock(held, fcntl.LOCK_EX)

    def end():
        (job.run.output / RESULT).write_text(json.dumps({"epochs": [], "test": {}}))
        held.close()

    timer = threading.Timer(1.0, end)
    timer.start()
    run_jobs([job], cluster, tmp_path)
    assert not cluster._processes
    assert not (job.run.output / "run.json").exists()


@pytest.mark.slow
def test_an_arm_that_must_make_room_is_queued_again_and_ends_the_same(job, tmp_path):
    longer = replace(job.run, epochs=6, checkpoint_seconds=1e9)
    arms = {name: Job(job.arm, replace(longer, output=tmp_path / name)) for name in ("undisturbed", "moved")}
    worker_runs(arms["undisturbed"])
    moved = arms["moved"]
    cluster = LocalCluster(tmp_path / ".jobs", at_once=1, threads=1)
    cluster.start([moved])
    [controller] = [process._process.pid for process in cluster._processes]
    while moved.epochs_done() < 2:
        time.sleep(0.01)
    [task] = Path(f"/proc/{controller}/task/{controller}/children").read_text().split()
    os.kill(int(task), signal.SIGUSR2)
    run_jobs([moved], cluster, tmp_path)
    said = "".join(file.read_text() for file in (tmp_path / ".jobs").glob("*.out"))
    assert "Requeued job" in said
    found, expected = (load_result(arm.run.output, arm.run) for arm in (moved, arms["undisturbed"]))
    assert without_times(found) == without_times(expected)


def test_a_cluster_that_is_not_there_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with raises_blockgate("--cluster slurm: expected Slurm's commands on this machine, got 'no sbatch, srun"):
        make_cluster("slurm", tmp_path, 1, 1, SlurmOptions())
    with raises_blockgate("--slurm.gpus: expected --scale paper with it, got '--scale laptop'"):
        reproduce(Order(experiment="table2", cluster="slurm", slurm=SlurmOptions(gpus=1), output=tmp_path))
    with raises_blockgate("--slurm: expected --cluster slurm with it"):
        make_cluster("local", tmp_path, 1, 1, SlurmOptions(gpus=1))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table2", "--arms", "ptb-gru-*"], "arms: expected names of arms of table2"),
        (["table2", "--jobs", "0"], "jobs: expected a positive int, got 0"),
        (["table1"], "Run `blockgate data fetch ptb`"),
        (["mnist"], "Run `blockgate data fetch mnist`"),
        (["table2", "--data-dir", "some/where"], "expected a file train.txt in some/where/ptb"),
        (["figure1", "--scale", "tiny", "--time"], "--time: expected a table, got 'figure1'"),
    ],
)
def test_mistakes_get_one_clear_line(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("BLOCKGATE_DATA", str(tmp_path / "nothing"))
    assert main(["reproduce", *words, "--output", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("blockgate: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_listing_the_arms(capsys):
    assert main(["reproduce", "table2", "--list", "--arms", "ptb-lstm-s*"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "ptb-lstm-static-50",
        "ptb-lstm-small-50",
        "ptb-lstm-small-75",
        "ptb-lstm-small-90",
        "ptb-lstm-small-no-dropout-50",
        "ptb-lstm-small-no-dropout-75",
        "ptb-lstm-small-no-dropout-90",
    ]
