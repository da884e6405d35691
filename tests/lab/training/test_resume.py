"""A run that is killed and resumed ends bit by bit like one that was not."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from blockgate.lab.training import Hook, train
from blockgate.lab.training.checkpoint import load_checkpoint, save_checkpoint
from blockgate.lab.training.config import AnnealConfig, OptimizerConfig, RampConfig, ScheduleConfig, run_to_plain
from tests.corpora import tiny_image_run, tiny_text_run, write_images, write_texts
from tests.helpers import raises_blockgate


def everything(folder):
    """All that a run leaves, but for times, speeds and its own name."""
    rows = [
        {name: value for name, value in row.items() if "second" not in name}
        for row in csv.DictReader((folder / "epochs.csv").read_text().splitlines())
    ]
    last, best = (load_checkpoint(folder / name) for name in ("last.pt", "best.pt"))
    for state in (last, best):
        for name in ("output", "resume", "checkpoint_seconds"):
            del state["run"][name]
    for row in last["training"]["rows"]:
        for name in [name for name in row if "second" in name]:
            del row[name]
    return rows, last, best, json.loads((folder / "results.json").read_text())


def assert_identical(a, b, at="run"):
    """Nested data equal bit by bit."""
    assert type(a) is type(b), at
    if isinstance(a, dict):
        assert a.keys() == b.keys(), at
        for name in a:
            assert_identical(a[name], b[name], f"{at}.{name}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), at
        for number, (one, other) in enumerate(zip(a, b, strict=True)):
            assert_identical(one, other, f"{at}[{number}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), at
    else:
        assert a == b, at


class Crash(Hook):
    """Fails after some updates of a process, at a moment when nothing is tidied up."""

    def __init__(self, after):
        self.left = after

    def after_update(self):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("crash")


def crash_and_resume(run, folder, crashes):
    """Runs once without a break, and once with crashes after so many updates; both must end the same: that end."""
    whole, broken = (replace(run, output=folder / name) for name in ("whole", "broken"))
    train(whole, quiet=True)
    broken = replace(broken, checkpoint_seconds=0.0)
    for number, after in enumerate(crashes):
        with pytest.raises(RuntimeError, match="crash"):
            train(replace(broken, resume=number > 0), hooks=[lambda *_, n=after: Crash(n)], quiet=True)
    train(replace(broken, resume=True), hooks=[lambda *_: Crash(-1)], quiet=True)
    found, expected = everything(folder / "broken"), everything(folder / "whole")
    # The crashing hook has a state of its own, empty, in front of the others.
    assert found[1]["training"]["hooks"].pop(0) == {}
    assert_identical(found, expected)
    return expected


RAMP = RampConfig(begin=0.5, end=1.5, every="update")
RUNS = {
    "sgd-ramp-plateau": {"ramp": RAMP, "schedule": ScheduleConfig(kind="plateau")},
    "adam-varied": {
        "optimizer": OptimizerConfig(kind="adam", lr=0.01),
        "varied_bptt": True,
        "activation_l2": 1.0,
        "slowness": 1.0,
        "schedule": ScheduleConfig(kind="cosine"),
    },
    "adam-averaged": {"optimizer": OptimizerConfig(kind="adam", lr=0.01, average_from=1.5), "ramp": RAMP},
    "asgd": {"optimizer": OptimizerConfig(kind="asgd", lr=50.0, clip=0.25, average_after=0), "epochs": 4},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_crashes_again_and_again_ends_the_same(name, tmp_path):
    texts = write_texts(tmp_path / "texts", train=700, other=120)
    expected = crash_and_resume(tiny_text_run(texts, tmp_path, **RUNS[name]), tmp_path, (3, 1, 12, 7))
    if name in {"asgd", "adam-averaged"}:
        average = expected[1]["training"]["hooks"][-1]
        assert average["count"] > 1
        # The best model is the averaged one.
        assert expected[2]["epoch"] < 2 or torch.equal(
            next(iter(average["means"].values())), next(iter(expected[2]["model"].values()))
        )


def annealed(run):
    """The same run with gates that anneal until the middle of its last epoch."""
    gate = replace(run.model.gate, gate="softmax_sum", normalise=None, select=None)
    return replace(run, model=replace(run.model, gate=gate), anneal=AnnealConfig(begin=0.2, end=run.epochs - 0.5))


def test_annealed_gates_resume_exactly(tmp_path):
    texts = write_texts(tmp_path / "texts", train=700, other=120)
    _, last, best, results = crash_and_resume(annealed(tiny_text_run(texts, tmp_path)), tmp_path, (5, 8))
    temperatures = {name: float(value) for name, value in last["model"].items() if name.endswith("temperature")}
    assert set(temperatures.values()) == {0.1}
    # Before the temperature has reached its end no model is the best one.
    assert best["epoch"] == results["epoch"] == last["training"]["epoch"]


def test_annealing_needs_gates_with_a_temperature(tmp_path):
    texts = write_texts(tmp_path / "texts", train=300, other=100)
    run = tiny_text_run(texts, tmp_path / "run", anneal=AnnealConfig(end=1))
    with raises_blockgate("temperature: expected a model with gates that have one"):
        train(run, quiet=True)


def test_more_epochs_continue_a_finished_run(tmp_path):
    texts = write_texts(tmp_path / "texts", train=700, other=120)
    run = tiny_text_run(texts, tmp_path, ramp=RAMP, schedule=ScheduleConfig(kind="plateau"))
    train(replace(run, output=tmp_path / "longer"), quiet=True)
    train(replace(run, output=tmp_path / "longer", epochs=4, resume=True), quiet=True)
    train(replace(run, output=tmp_path / "whole", epochs=4), quiet=True)
    found, expected = everything(tmp_path / "longer"), everything(tmp_path / "whole")
    for best in (found[2], expected[2]):  # it may be of the first part
        del best["run"]["epochs"]
    assert_identical(found, expected)
    with raises_blockgate("epochs: 4 -> 3"):
        train(replace(run, output=tmp_path / "longer", epochs=3, resume=True), quiet=True)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"schedule": ScheduleConfig(kind="cosine")}, "epochs: 1 -> 3, but the cosine schedule ended with epoch 1"),
        ({"ramp": RAMP}, "counted as the best although sparsity still rises until epoch 1.5"),
        ({"anneal": AnnealConfig(end=2)}, "counted as the best although the temperature still falls until epoch 2"),
    ],
)
def test_more_epochs_are_refused_where_they_would_change_the_first_ones(tmp_path, options, reason):
    texts = write_texts(tmp_path / "texts", train=300, other=100)
    run = tiny_text_run(texts, tmp_path / "run", epochs=1, **options)
    run = replace(annealed(run), anneal=run.anneal) if "anneal" in options else run
    train(run, quiet=True)
    with raises_blockgate(reason) as caught:
        train(replace(run, epochs=3, resume=True), quiet=True)
    assert "--start" in str(caught.value)


def test_an_epoch_counts_the_time_before_it_was_resumed(tmp_path):
    texts = write_texts(tmp_path / "texts", train=300, other=100)
    run = tiny_text_run(texts, tmp_path / "run", checkpoint_seconds=0.0)
    with pytest.raises(RuntimeError, match="crash"):
        train(run, hooks=[lambda *_: Crash(2)], quiet=True)
    last = run.output / "last.pt"
    state = load_checkpoint(last)
    assert min(state["training"]["spent"]) > 0
    state["training"]["spent"] = [1000.0, 500.0]
    save_checkpoint(last, state)
    train(replace(run, resume=True), hooks=[lambda *_: Crash(-1)], quiet=True)
    first, second, *_ = csv.DictReader((run.output / "epochs.csv").read_text().splitlines())
    assert 1000 <= float(first["seconds"]) < 1100
    assert 500 <= float(first["cpu_seconds"]) < 600
    assert float(second["seconds"]) < 100


def test_images_resume_in_the_middle_of_an_epoch(tmp_path):
    images = write_images(tmp_path / "images")
    crash_and_resume(tiny_image_run(images, tmp_path), tmp_path, (14,))


def test_a_process_killed_outright_is_resumed_exactly(tmp_path):
    texts = write_texts(tmp_path / "texts", train=700, other=120)
    run = tiny_text_run(texts, tmp_path / "whole", epochs=4, ramp=RAMP)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(run_to_plain(replace(run, checkpoint_seconds=0.0))))
    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "blockgate", "train", str(config), "--output", str(killed)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ) as process:
        while not (killed / "epochs.csv").exists() and process.poll() is None:
            time.sleep(0.01)
        time.sleep(0.05)
        process.kill()
    assert process.returncode == -9
    assert not (killed / "results.json").exists()
    at = load_checkpoint(killed / "last.pt")["training"]["updates"]
    train(replace(run, output=killed, resume=True), quiet=True)
    train(run, quiet=True)
    whole = everything(tmp_path / "whole")
    assert 0 < at < whole[1]["training"]["updates"]
    assert_identical(everything(killed), whole)
    left = {path.name for path in killed.iterdir() if not path.name.startswith(".")}
    assert left == {path.name for path in (tmp_path / "whole").iterdir()}
