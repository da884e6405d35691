"""Runs the arms of an experiment on a cluster, shows how far they are, and leaves them without loss."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockgate.errors import missing_extra
from blockgate.lab.reproduce.clusters import Cluster
from blockgate.lab.reproduce.jobs import Job, check_done
from blockgate.lab.reproduce.results import RESULT
from blockgate.lab.reproduce.signals import handling
from blockgate.lab.reproduce.worker import FAILED

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["run_jobs"]

# The looks after which a job that is gone is believed to be gone: files of other machines may come late.
PATIENCE = 4


def run_jobs(jobs: list[Job], cluster: Cluster, folder: Path) -> None:
    """Runs the jobs that have no result; those that an earlier call left in a queue are waited for.

    Raises:
        KeyboardInterrupt: after Ctrl-C or SIGTERM, once all processes of this machine have written a checkpoint.
        BlockgateError: if jobs failed; all others have been run.
    """
    left = [job for job in jobs if not job.is_done]
    if not left:
        return
    for job in left:
        # What failed before is tried again.
        (job.run.output / FAILED).unlink(missing_ok=True)
    with handling(signal.SIGTERM, signal.default_int_handler):
        try:
            _watch(left, cluster)
            cluster.close()
        except KeyboardInterrupt:
            cluster.stop()
            waiting = [job for job in left if not job.is_done]
            if cluster.ends_with_us:
                raise
            raise KeyboardInterrupt(
                f"{len(waiting)} arms stay in the queue; the same command watches them, scancel ends them"
            ) from None
        except BaseException:
            cluster.stop()
            raise
    check_done(left, folder)


def _watch(jobs: list[Job], cluster: Cluster) -> None:
    """Starts jobs that nobody is at, and shows a bar, and a line for each that ends, until all have ended."""
    try:
        from rich.console import Console
        from rich.progress import Progress, TextColumn
    except ImportError as error:
        raise missing_extra("reproduce", error) from None

    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:2], TextColumn("{task.fields[facts]}"))
    known = cluster.alive(jobs)
    cluster.start([job for job in jobs if job not in known])
    ended: set[Job] = set()
    gone: dict[Job, int] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("epochs", total=sum(job.run.epochs for job in jobs), facts="")
        while len(ended) < len(jobs):
            alive = cluster.alive(jobs)
            for job in jobs:
                if job in ended:
                    continue
                gone[job] = 0 if job in alive else gone.get(job, 0) + 1
                if (job.is_done or job.has_failed) or gone[job] > PATIENCE:
                    ended.add(job)
                    _tell(console, job, len(ended), len(jobs))
            epochs = {job: job.epochs_done() for job in jobs}
            active = [job.arm for job in jobs if job not in ended and epochs[job]]
            bar.update(task, completed=sum(epochs.values()), facts=", ".join(active))
            if len(ended) < len(jobs):
                time.sleep(cluster.glance)


def _tell(console: Console, job: Job, count: int, total: int) -> None:
    if job.is_done:
        result: dict[str, Any] = json.loads((job.run.output / RESULT).read_text())
        minutes = sum(row["seconds"] for row in result["epochs"]) / 60
        text = "  ".join(f"test {name} {value:.5g}" for name, value in result["test"].items())
        text += f"  {minutes:.1f} min"
    else:
        text = "failed" if job.has_failed else "ended without a result"
    console.print(f"[{count}/{total}] {job.title}: {text}", highlight=False, markup=False, soft_wrap=True)
