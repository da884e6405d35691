"""Two processes learn what one does from the same batches, and any precision that the machine has can be asked for."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockgate.lab.training import load_trained, train
from blockgate.lab.training.checkpoint import load_checkpoint
from blockgate.lab.training.config import OptimizerConfig, PruningConfig, RampConfig, run_to_plain
from tests.corpora import tiny_image_run, tiny_text_run, write_images, write_texts
from tests.helpers import raises_blockgate

ROOT = Path(__file__).parents[3]
ADAM = OptimizerConfig(kind="adam", lr=0.01, gate_lr=0.005, clip=0.25, revive=0.3)
# Steps so large that validation gets worse for an epoch, and averaging begins.
AVERAGED = OptimizerConfig(kind="asgd", lr=5.0, clip=0.25, average_after=0, revive=0.3)


@pytest.fixture(autouse=True)
def facts(tmp_path, monkeypatch):
    """What the processes of the test have written down, one after the other, and forgotten."""
    folder = tmp_path / "facts"
    folder.mkdir()
    monkeypatch.setenv("WATCH", str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))

    def take():
        files = sorted(folder.iterdir())
        assert [file.name for file in files] == [f"{rank}.json" for rank in range(len(files))]
        found = [json.loads(file.read_text()) for file in files]
        for file in files:
            file.unlink()
        return found

    return take


def assert_shared(found, world, strategy):
    """That as many processes were together, each with its part of the weights, or with all of them."""
    assert [fact["world"] for fact in found] == [world] * world
    for fact in found:
        assert fact["kinds"] == (["DTensor"] if strategy == "fsdp" else ["Tensor"])
        assert fact["share"] == (pytest.approx(1 / world, abs=0.1) if strategy == "fsdp" else 1)


def words_for(run, folder, *options):
    """The words after `python -m` that train a run."""
    config = folder / f"{run.output.name}.json"
    config.write_text(json.dumps(run_to_plain(run)))
    return ["tests.lab.training.watched", "train", str(config), *options]


def train_in_processes(run, folder, *options):
    """`blockgate train` in new processes; returns the result of the first."""
    command = [sys.executable, "-m", *words_for(run, folder, *options)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ, timeout=280)


def undropped(run):
    """In double precision, so that rounding opens no other gate; and nothing dropped, as each process would."""
    model = replace(run.model, word_dropout=0.0, dropout=0.0, weight_dropout=0.0, zoneout=0.0)
    return replace(run, model=model, precision="64-true")


def assert_same_weights(one, two, processes=2):
    a, b = (load_checkpoint(folder / "last.pt") for folder in (one, two))
    assert a["training"]["updates"] == b["training"]["updates"]
    for name, weight in a["model"].items():
        torch.testing.assert_close(b["model"][name], weight, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    valid = [state["training"]["rows"][-1]["valid_loss"] for state in (a, b)]
    assert valid[0] == pytest.approx(valid[1], rel=1e-9)
    assert len(b["training"]["processes"]) == processes


@pytest.mark.parametrize(
    ("strategy", "optimizer", "epochs"), [("ddp", ADAM, 1), ("fsdp", ADAM, 1), ("fsdp", AVERAGED, 3)]
)
def test_two_processes_learn_a_language_as_one(strategy, optimizer, epochs, tmp_path, facts):
    texts = write_texts(tmp_path / "texts", train=500, other=101)
    options = {"ramp": RampConfig(end=1, every="update"), "balance": 0.1, "optimizer": optimizer, "epochs": epochs}
    run = undropped(tiny_text_run(texts, tmp_path / "one", **options))
    train(run, quiet=True)
    two = replace(run, output=tmp_path / "two", strategy=strategy)
    result = train_in_processes(two, tmp_path, "--devices", "2")
    assert result.returncode == 0, result.stderr
    assert_shared(facts(), 2, strategy)
    assert_same_weights(tmp_path / "one", tmp_path / "two")
    assert result.stderr.count("epoch 1 ") == 1
    assert "UserWarning" not in result.stderr
    averages = [hook["means"] for hook in training_of(two)["hooks"] if "means" in hook]
    assert [bool(means) for means in averages] == ([True] if optimizer.kind == "asgd" else [])
    # One process loads what two have written, and no other number of processes goes on with it.
    assert load_trained(tmp_path / "two").run.devices == 2
    with raises_blockgate("devices: 2 -> 1"):
        train(replace(two, strategy="auto", resume=True), quiet=True)


@pytest.mark.parametrize(("strategy", "each"), [("ddp", 1), ("fsdp", 2)])
def test_two_machines_learn_as_one_process(strategy, each, tmp_path, facts):
    """Two torchruns that meet at an address, as on two machines."""
    texts = write_texts(tmp_path / "texts", train=500, other=101)
    run = undropped(tiny_text_run(texts, tmp_path / "one", epochs=1, optimizer=ADAM))
    train(run, quiet=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    many = replace(run, output=tmp_path / "many", strategy=strategy, devices=each, nodes=2)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={each}"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
    command += ["-m", *words_for(many, tmp_path, "--resume")]
    machines = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [machine.communicate(timeout=280)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert_shared(facts(), 2 * each, strategy)
    assert_same_weights(tmp_path / "one", tmp_path / "many", 2 * each)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_of_two_processes_that_was_killed_ends_bit_by_bit_the_same(strategy, tmp_path, facts):
    texts = write_texts(tmp_path / "texts", train=500, other=101)
    run = tiny_text_run(texts, tmp_path / "whole", epochs=3, checkpoint_seconds=0.0, optimizer=AVERAGED)
    run = replace(run, devices=2, strategy=strategy)
    assert train_in_processes(run, tmp_path).returncode == 0
    killed = replace(run, output=tmp_path / "killed")
    command = [sys.executable, "-m", *words_for(killed, tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as process:
        while not (killed.output / "epochs.csv").exists() and process.poll() is None:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    before = training_of(killed)["updates"]
    result = train_in_processes(killed, tmp_path, "--resume")
    assert result.returncode == 0, result.stderr
    assert_shared(facts(), 2, strategy)
    ends = [load_checkpoint(each.output / "last.pt") for each in (run, killed)]
    assert 0 < before < ends[0]["training"]["updates"] == ends[1]["training"]["updates"]
    assert ends[0]["training"]["hooks"][-1]["means"]
    for name, weight in ends[0]["model"].items():
        assert torch.equal(ends[1]["model"][name], weight), name


def training_of(run):
    return load_checkpoint(run.output / "last.pt")["training"]


def test_what_fsdp_cannot_do_is_said(tmp_path):
    run = tiny_text_run(tmp_path, tmp_path / "run", strategy="fsdp", pruning=PruningConfig(sparsity=0.5, end=1))
    with raises_blockgate("strategy: expected auto or ddp with pruning, got 'fsdp'"):
        train(run, quiet=True)


TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}
SLURM = {"SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ({}, {"nodes": 2}, "nodes: expected 1, or torchrun or srun to start the processes of all machines, got 2"),
        (TORCHRUN, {"devices": 2}, "2 on each machine and 4 in all, got '--devices 2 --nodes 1"),
        (TORCHRUN, {"nodes": 2}, "or give torchrun --nnodes 2 --nproc-per-node 1"),
        (TORCHRUN, {"devices": 4}, "as torchrun has started, 2 on each machine"),
        (SLURM, {"nodes": 2}, "as srun has started, 2 on each machine and 4 in all, got '--devices 1 --nodes 2"),
        (SLURM | {"SLURM_JOB_NAME": "bash"}, {"nodes": 2}, "nodes: expected 1, or torchrun or srun"),
        (
            {"SLURM_NTASKS": "4", "SLURM_NNODES": "2"},
            {"devices": 2, "nodes": 2},
            "as srun has started, 1 on each machine and 1 in all",
        ),
    ],
)
def test_processes_that_nobody_starts_are_not_waited_for(environment, options, message, tmp_path, monkeypatch):
    for name in (*TORCHRUN, *SLURM, "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run = tiny_text_run(tmp_path, tmp_path / "run", **options)
    with raises_blockgate(message) as caught:
        train(run, quiet=True)
    assert "\n" not in str(caught.value)
    assert not run.output.exists()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_learn_images_as_one_with_uneven_batches(strategy, tmp_path, facts):
    # 159 images in batches of 14: the last has 5, of which one process takes 3 and the other 2.
    images = write_images(tmp_path / "images", train=200, test=61)
    options = {"batch_size": 14, "eval_batch_size": 12, "valid_size": 41, "precision": "64-true"}
    run = tiny_image_run(images, tmp_path / "one", **options)
    train(run, quiet=True)
    two = replace(run, output=tmp_path / "two", strategy=strategy)
    result = train_in_processes(two, tmp_path, "--devices=2")
    assert result.returncode == 0, result.stderr
    assert_shared(facts(), 2, strategy)
    assert_same_weights(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("options", [(), ("--devices=2",), ("--devices=2", "--strategy=fsdp")])
def test_bfloat16_runs_where_the_machine_can(options, tmp_path, facts):
    texts = write_texts(tmp_path / "texts", train=300, other=100)
    run = undropped(tiny_text_run(texts, tmp_path / "run", epochs=1, optimizer=ADAM))
    train(replace(run, precision="32-true", output=tmp_path / "single"), quiet=True)
    # In processes of its own: on machines that only pretend, torch's product dies of an illegal instruction.
    result = train_in_processes(run, tmp_path, "--precision", "bf16-mixed", *options)
    if result.returncode == -signal.SIGILL or f"code {-signal.SIGILL}" in result.stderr:
        pytest.skip("this machine has no bfloat16 product")
    assert result.returncode == 0, result.stderr
    assert {dtype for fact in facts() for dtype in fact["dtypes"]} == {"torch.float32"}
    half, single = (load_checkpoint(tmp_path / name / "last.pt") for name in ("run", "single"))
    assert half["model"]["embedding.weight"].dtype == torch.float32
    # Near, and not the same: products were rounded.
    losses = [state["training"]["rows"][-1]["valid_loss"] for state in (half, single)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
