"""Runs arms in several processes, shows how far they are, and stops them without loss."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockgate.checkpoint.atomic import write_whole
from blockgate.errors import BlockgateError, missing_extra
from blockgate.lab.reproduce.results import RESULT
from blockgate.lab.reproduce.worker import FAILED, LOG
from blockgate.lab.training import Run
from blockgate.lab.training.config import run_to_plain

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Job", "check_done", "run_jobs"]

# Seconds between looks at the folders.
GLANCE = 0.5


@dataclass(frozen=True, slots=True)
class Job:
    """An arm with a seed, and the run that trains it."""

    arm: str
    run: Run

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.arm}, seed {self.run.seed}"

    @property
    def is_done(self) -> bool:
        """Whether its result is there."""
        return (self.run.output / RESULT).is_file()

    @property
    def has_failed(self) -> bool:
        """Whether a process gave it up."""
        return (self.run.output / FAILED).is_file()

    def epochs_done(self) -> int:
        """As the table of epochs says."""
        try:
            return max(0, len((self.run.output / "epochs.csv").read_text().splitlines()) - 1)
        except OSError:
            return 0


def run_jobs(jobs: list[Job], processes: int, folder: Path) -> None:
    """Runs what is not done yet, in so many processes at once; each runs one job after the other.

    Raises:
        KeyboardInterrupt: after Ctrl-C, once every process has saved its checkpoint; a second one doesn't wait.
        BlockgateError: if jobs failed; all others have been run.
    """
    left = [job for job in jobs if not job.is_done]
    if not left:
        return
    for job in left:
        # What failed before is tried again.
        (job.run.output / FAILED).unlink(missing_ok=True)
    plan = folder / f".plan-{os.getpid()}.json"
    write_whole(plan, json.dumps([{"arm": job.arm, "run": run_to_plain(job.run)} for job in left], indent=1))
    try:
        with _workers(plan, min(processes, len(left)), folder) as workers:
            _watch(left, workers)
    finally:
        plan.unlink(missing_ok=True)
    check_done(left, folder)


@contextlib.contextmanager
def _workers(plan: Path, count: int, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that run a plan; when the context is left early they are told to stop, and waited for."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_terminate_as_interrupt())
        workers = []
        try:
            for number in range(count):
                log = stack.enter_context((folder / f"worker-{number}.log").open("wb"))
                command = [sys.executable, "-m", "blockgate.lab.reproduce", str(plan)]
                # A session of their own: Ctrl-C reaches only this process, which passes it on once.
                workers.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
            yield workers
        except BaseException:
            _stop(workers)
            raise


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Lets SIGTERM do what Ctrl-C does."""
    try:
        old = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # not the main thread: there is nothing to change
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def _stop(workers: list[subprocess.Popen[bytes]]) -> None:
    try:
        for worker in workers:
            if worker.poll() is None:
                worker.send_signal(signal.SIGINT)
        for worker in workers:
            worker.wait()
    except KeyboardInterrupt:
        for worker in workers:
            worker.kill()
            worker.wait()
        raise


def _watch(jobs: list[Job], workers: list[subprocess.Popen[bytes]]) -> None:
    """Shows a bar, and a line for each job that ends, until all processes have ended."""
    try:
        from rich.console import Console
        from rich.progress import Progress, TextColumn
    except ImportError as error:
        raise missing_extra("reproduce", error) from None

    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:2], TextColumn("{task.fields[facts]}"))
    ended: set[Job] = set()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("epochs", total=sum(job.run.epochs for job in jobs), facts="")
        while True:
            running = any(worker.poll() is None for worker in workers)
            for job in jobs:
                if job not in ended and (job.is_done or job.has_failed):
                    ended.add(job)
                    _tell(console, job, len(ended), len(jobs))
            epochs = {job: job.epochs_done() for job in jobs}
            active = [job.arm for job in jobs if job not in ended and epochs[job]]
            bar.update(task, completed=sum(epochs.values()), facts=", ".join(active))
            if not running:
                return
            time.sleep(GLANCE)


def _tell(console: Console, job: Job, count: int, total: int) -> None:
    if job.has_failed:
        text = "failed"
    else:
        result: dict[str, Any] = json.loads((job.run.output / RESULT).read_text())
        minutes = sum(row["seconds"] for row in result["epochs"]) / 60
        text = "  ".join(f"test {name} {value:.5g}" for name, value in result["test"].items())
        text += f"  {minutes:.1f} min"
    console.print(f"[{count}/{total}] {job.title}: {text}", highlight=False, markup=False, soft_wrap=True)


def check_done(jobs: list[Job], folder: Path) -> None:
    """Raises if one of the jobs has no result."""
    for job in jobs:
        if job.has_failed:
            reason = (job.run.output / FAILED).read_text().strip()
            raise BlockgateError(
                f"{job.title} failed: {reason} See {job.run.output / LOG}; the same command tries again."
            )
    missing = [job.title for job in jobs if not job.is_done]
    if missing:
        raise BlockgateError(
            f"reproduce: expected results of all arms, got none of {'; '.join(missing)}. Another process may be at "
            f"work on them, or was killed: see {folder}/worker-*.log, then give the same command again."
        )
