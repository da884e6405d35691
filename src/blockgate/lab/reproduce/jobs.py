"""Jobs: arms with a seed, and what their folders tell of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from blockgate.checkpoint.atomic import write_whole
from blockgate.errors import BlockgateError
from blockgate.lab.reproduce.results import RESULT
from blockgate.lab.reproduce.worker import FAILED, LOG
from blockgate.lab.training import Run

__all__ = ["Job", "check_done"]

# In the folder of an arm: the cluster's number for the job that runs it.
QUEUED = "queued.json"


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

    @property
    def number(self) -> str | None:
        """What the cluster calls it; None if it was never submitted to one."""
        try:
            number: str = json.loads((self.run.output / QUEUED).read_text())["job"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return number

    def note_number(self, number: str) -> None:
        """Keeps what the cluster calls it, for later calls."""
        write_whole(self.run.output / QUEUED, json.dumps({"job": number}) + "\n")

    def epochs_done(self) -> int:
        """As the table of epochs says."""
        try:
            return max(0, len((self.run.output / "epochs.csv").read_text().splitlines()) - 1)
        except OSError:
            return 0


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
            f"reproduce: expected results of all arms, got none of {'; '.join(missing)}. Their processes ended early: "
            f"see {folder}/.jobs, then give the same command again."
        )
