"""Where arms run: processes of this machine, or jobs of a Slurm cluster. Both through submitit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockgate.errors import invalid, missing_extra
from blockgate.lab.reproduce.jobs import Job
from blockgate.lab.reproduce.signals import handling
from blockgate.lab.reproduce.worker import Arms, is_claimed
from blockgate.lab.training.config import run_to_plain

__all__ = ["Cluster", "SlurmOptions", "make_cluster"]

# How often a job may run into its time limit before it is given up: each time it gets further.
MOST_TIMEOUTS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions:
    """What a job asks of Slurm."""

    partition: str | None = None
    """Partition; the cluster's default if unset."""
    minutes: int = 240
    """Time limit. An arm that needs longer is saved shortly before, queued again, and goes on."""
    gpus: int = 0
    """GPUs for each arm; the arms of --scale paper use one."""
    memory_gb: float | None = None
    """Memory for each arm."""
    account: str | None = None
    """Who pays."""
    warning_seconds: int = 90
    """How long before the limit an arm is told to save."""


class Cluster(ABC):
    """Runs jobs.

    Args:
        folder: for the files of submitit.
        at_once: how many jobs may run at the same time.
        threads: CPU threads of each.
    """

    # Whether jobs end when the command that started them does, and the seconds between looks at them.
    ends_with_us: bool
    glance: float

    def __init__(self, folder: Path, at_once: int, threads: int) -> None:
        self.folder, self.at_once, self.threads = folder, at_once, threads

    @abstractmethod
    def start(self, jobs: Sequence[Job]) -> None:
        """Starts these jobs; `at_once` of them run at the same time."""

    @abstractmethod
    def alive(self, jobs: Sequence[Job]) -> set[Job]:
        """Those that run, or wait in a queue; whoever has started them."""

    @abstractmethod
    def stop(self) -> None:
        """Leaves the jobs: ends those that end with us, once they are saved."""

    @abstractmethod
    def close(self) -> None:
        """After the last job has ended."""


class LocalCluster(Cluster):
    """Processes of this machine, each with a controller that starts it again if it asks for that."""

    ends_with_us, glance = True, 0.5
    # Nobody's time is up here.
    MINUTES = 60 * 24 * 365

    def __init__(self, folder: Path, at_once: int, threads: int) -> None:
        super().__init__(folder, at_once, threads)
        self._executor = _executor(
            _submitit().LocalExecutor, folder, timeout_min=self.MINUTES, signal_delay_s=0, stderr_to_stdout=True
        )
        self._processes: list[Any] = []

    def start(self, jobs: Sequence[Job]) -> None:
        """As many processes as may run at once; each takes the next job that no other has taken."""
        runs = tuple((job.arm, run_to_plain(job.run)) for job in jobs)
        # They don't hear Ctrl-C in the terminal: we tell them.
        with handling(signal.SIGINT, signal.SIG_IGN):
            for _ in range(min(self.at_once, len(jobs))):
                self._processes.append(self._executor.submit(Arms(runs, owner=os.getpid())))

    def alive(self, jobs: Sequence[Job]) -> set[Job]:
        """All while one of our processes is left, and those whose folder a process of another call holds."""
        ours = any(not process.done() for process in self._processes)
        return {job for job in jobs if ours or is_claimed(job.run.output)}

    def stop(self) -> None:
        """Tells all, then waits for them; a second Ctrl-C kills them."""
        # A controller hands SIGTERM on, and ends once its task has.
        controllers = [process._process for process in self._processes if not process.done()]
        try:
            for controller in controllers:
                controller.send_signal(signal.SIGTERM)
            for controller in controllers:
                controller.wait()
        except KeyboardInterrupt:
            for controller in controllers:
                controller.kill()
            raise

    def close(self) -> None:
        """Waits for the processes, which have nothing left to do."""
        for process in self._processes:
            process._process.wait()


class SlurmCluster(Cluster):
    """Jobs in the queue of Slurm, which go on when this process ends."""

    ends_with_us, glance = False, 3.0

    def __init__(self, folder: Path, at_once: int, threads: int, options: SlurmOptions) -> None:
        super().__init__(folder, at_once, threads)
        submitit = _submitit()
        if missing := [name for name in ("sbatch", "srun", "squeue", "scontrol") if shutil.which(name) is None]:
            raise invalid(
                "--cluster slurm",
                expected="Slurm's commands on this machine",
                got=f"no {', '.join(missing)}",
                remedy="Run it on a login node, or with --cluster local.",
            )
        self.alive(())
        wanted = {
            "partition": options.partition,
            "account": options.account,
            "gpus_per_node": options.gpus or None,
            "mem": None if options.memory_gb is None else f"{round(options.memory_gb * 1024)}MB",
        }
        self._executor = _executor(
            submitit.SlurmExecutor,
            folder,
            job_name="blockgate",
            time=options.minutes,
            cpus_per_task=threads,
            array_parallelism=at_once,
            signal_delay_s=options.warning_seconds,
            stderr_to_stdout=True,
            additional_parameters={"requeue": True},
            **{name: value for name, value in wanted.items() if value is not None},
        )

    def start(self, jobs: Sequence[Job]) -> None:
        """One job of the queue for each."""
        tasks = [Arms(((job.arm, run_to_plain(job.run)),), stays=True) for job in jobs]
        try:
            submitted = self._executor.submit_array(tasks) if tasks else []
        except Exception as error:
            raise invalid(
                "--cluster slurm",
                expected="a queue that takes the jobs",
                got=" ".join(str(error).split())[:300],
                remedy="Check the options that begin with --slurm, and the output of sinfo.",
            ) from None
        for job, made in zip(jobs, submitted, strict=True):
            job.note_number(made.job_id)

    def alive(self, jobs: Sequence[Job]) -> set[Job]:
        """Those that the queue knows. `sacct`, which submitit asks, needs an accounting service."""
        told = subprocess.run(
            ["squeue", "--me", "--array", "--noheader", "--format=%i"], capture_output=True, text=True, check=False
        )
        if told.returncode:
            raise invalid(
                "--cluster slurm",
                expected="a cluster that answers squeue",
                got=" ".join(told.stderr.split())[:200],
                remedy="Run it where sinfo shows the cluster.",
            )
        queued = set(told.stdout.split())
        return {job for job in jobs if job.number in queued}

    def stop(self) -> None:
        """Nothing: the queue keeps them."""

    def close(self) -> None:
        """Nothing."""


def make_cluster(name: str, folder: Path, at_once: int, threads: int, options: SlurmOptions) -> Cluster:
    """The cluster of this name: "local" or "slurm"."""
    if name == "slurm":
        return SlurmCluster(folder, at_once, threads, options)
    if options != SlurmOptions():
        raise invalid("--slurm", expected="--cluster slurm with it", got=f"--cluster {name}", remedy="Add it.")
    return LocalCluster(folder, at_once, threads)


def _executor(kind: Any, folder: Path, **options: Any) -> Any:
    executor = kind(folder, max_num_timeout=MOST_TIMEOUTS)
    executor.update_parameters(**options)
    return executor


def _submitit() -> Any:
    try:
        import submitit
    except ImportError as error:
        raise missing_extra("reproduce", error) from None
    return submitit
