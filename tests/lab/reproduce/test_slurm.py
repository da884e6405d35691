"""Sweeps on a real Slurm cluster, of one node; skipped with the reason where none can be started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from blockgate.lab.reproduce import Arm, run_of
from blockgate.lab.reproduce.clusters import SlurmOptions, make_cluster
from blockgate.lab.reproduce.jobs import Job
from blockgate.lab.reproduce.results import load_result
from blockgate.lab.reproduce.sweep import run_jobs
from blockgate.lab.reproduce.tiny import tiny_run
from blockgate.lab.reproduce.worker import Arms
from blockgate.lab.training import shipped_configs
from blockgate.lab.training.checkpoint import load_checkpoint
from blockgate.lab.training.config import run_to_plain
from tests.corpora import tiny_text_run, write_texts
from tests.helpers import raises_blockgate
from tests.lab.reproduce.test_reproduce import without_times

SCRIPT = Path(__file__).parents[2] / "tools" / "one_node_slurm.sh"


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A cluster that is stopped after the test."""
    folder = tmp_path / "slurm"
    done = subprocess.run([SCRIPT, "start", folder], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(done.stderr.strip().splitlines()[0])
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    # Not to be imported from here by jobs that begin elsewhere.
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parents[2] / "src"))
    yield
    subprocess.run([SCRIPT, "stop", folder], check=False)


def wait_for(fact, seconds=120.0):
    end = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


class Moved:
    """An arm in the queue, and the files of its job."""

    def __init__(self, folder, **options):
        self.folder, self.options = folder / ".jobs", SlurmOptions(partition="common", **options)
        self.job = Job("arm", arm_in(folder, "moved"))
        self.cluster().start([self.job])
        self.log = self.folder / f"{self.job.number}_0_log.out"
        wait_for(lambda: self.job.epochs_done() >= 2)

    def cluster(self):
        """As a call makes it that knows nothing but the folder; an arm takes both processors of the node."""
        return make_cluster("slurm", self.folder, 2, os.cpu_count(), self.options)

    def facts(self):
        """What Slurm knows of the job."""
        command = ["scontrol", "show", "job", self.job.number]
        words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        return dict(word.partition("=")[::2] for word in words)

    def process(self):
        """The process at work."""
        listed = subprocess.run(["scontrol", "listpids", self.job.number], capture_output=True, text=True, check=True)
        for pid in [int(line.split()[0]) for line in listed.stdout.splitlines()[1:]]:
            with contextlib.suppress(OSError):
                if b"submitit.core._submit" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return None

    def finish(self):
        """Waits until the job is queued again, lets it start at once, and watches it to the end."""
        wait_for(lambda: self.facts()["JobState"] == "PENDING" and self.facts()["Restarts"] == "1")
        assert not self.job.is_done
        # A requeued job waits two minutes, unless somebody says otherwise.
        subprocess.run(["scontrol", "update", f"JobId={self.job.number}", "StartTime=now"], check=True)
        later = self.cluster()
        assert later.alive([self.job]) == {self.job}
        run_jobs([self.job], later, self.folder.parent)
        assert self.log.read_text().count("Starting with JobEnvironment") == 2


def arm_in(folder, name):
    base = tiny_run(shipped_configs()["ptb-lstm-laptop"], folder / "data")
    run = replace(run_of(Arm("ptb-lstm", "dynamic", 90), base), epochs=6, threads=1, accelerator="cpu")
    return replace(run, checkpoint_seconds=1e9, output=folder / name)


@pytest.fixture(scope="module")
def in_peace(tmp_path_factory):
    """The result of the arm when nobody disturbs it."""
    run = arm_in(tmp_path_factory.mktemp("whole"), "whole")
    Arms((("arm", run_to_plain(run)),))()
    return without_times(load_result(run.output, run))


def assert_as_in_peace(moved, in_peace):
    found = without_times(load_result(moved.job.run.output, moved.job.run))
    assert found == in_peace


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_a_job_that_is_told_to_move_goes_on_and_a_later_call_collects_it(tmp_path, in_peace):
    moved = Moved(tmp_path, minutes=5)
    # As where Slurm is set to send it when a more urgent job needs the node.
    subprocess.run(["scancel", "--signal=USR2", moved.job.number], check=True)
    moved.finish()
    assert "Requeued job" in moved.log.read_text()
    assert_as_in_peace(moved, in_peace)
    with raises_blockgate("--cluster slurm: expected a queue that takes the jobs, got"):
        make_cluster("slurm", tmp_path / ".jobs", 2, 1, SlurmOptions(partition="nowhere")).start([moved.job])


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_a_job_whose_time_is_up_goes_on(tmp_path, in_peace):
    # Slurm warns up to a minute earlier than it is asked to.
    moved = Moved(tmp_path, minutes=2, warning_seconds=20)
    # A slow node: the arm stands still until Slurm has sent its warning.
    process = moved.process()
    os.kill(process, signal.SIGSTOP)
    try:
        wait_for(lambda: is_pending(process, signal.SIGUSR2))
    finally:
        # Slurm may have let it go on itself.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)
    moved.finish()
    assert "this job is timed-out" in moved.log.read_text()
    assert_as_in_peace(moved, in_peace)


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_a_job_makes_room_for_a_more_urgent_one(tmp_path, in_peace):
    moved = Moved(tmp_path, minutes=5)
    urgent = ["sbatch", "--partition=urgent", f"--cpus-per-task={os.cpu_count()}", f"--output={tmp_path}/urgent"]
    subprocess.run([*urgent, "--wrap=echo here"], check=True)
    wait_for(lambda: (tmp_path / "urgent").is_file())
    moved.finish()
    assert "DUE TO PREEMPTION" in moved.log.read_text()
    assert_as_in_peace(moved, in_peace)


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_srun_starts_the_processes_of_one_run(tmp_path):
    run = tiny_text_run(write_texts(tmp_path / "texts", train=500, other=101), tmp_path / "run", epochs=1)
    (tmp_path / "run.json").write_text(json.dumps(run_to_plain(run)))
    srun = ["srun", "--overcommit", "--nodes=1", "--ntasks-per-node=2", sys.executable, "-m", "blockgate", "train"]
    options = [str(tmp_path / "run.json"), "--strategy=fsdp"]
    refused = subprocess.run([*srun, *options], capture_output=True, text=True, check=False)
    assert "as many processes as srun has started, 2 on each machine and 2 in all" in refused.stderr
    assert refused.returncode == 2
    subprocess.run([*srun, *options, "--devices=2"], check=True)
    assert len(load_checkpoint(run.output / "last.pt")["training"]["processes"]) == 2


def is_pending(process, number):
    """Whether a signal waits for a process that stands still, or has ended it."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return True
    masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))]
    return any(mask >> (number - 1) & 1 for mask in masks)
