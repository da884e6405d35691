"""What a process of a sweep does: it runs arms, and stops in time when it is told to."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from blockgate.checkpoint.atomic import write_whole
from blockgate.errors import BlockgateError
from blockgate.lab.reproduce.results import RESULT, run_arm
from blockgate.lab.training.config import run_from_plain

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

__all__ = ["FAILED", "LOG", "Arms", "is_claimed"]

# In the folder of an arm: what went wrong, and what the run has to say.
FAILED, LOG = "failed.txt", "log.txt"

INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Arms:
    """Runs arms, or goes on with them; submitit calls it in a process of its own.

    SIGUSR2 says that time is up or that somebody else needs the place: the arm at work is saved and the job put back
    into the queue. SIGTERM says that the job is to end: the arm is saved, and goes on when somebody asks for it again.

    Args:
        runs: the runs that train them, as plain data, by their names; arms that are done or taken are left out.
        owner: the process that waits for the arms. When it is gone, the arm at work is the last.
        stays: whether the process waits to be killed after SIGTERM, as Slurm expects it to: a job that ended by itself
            would not be queued again after it had to make room.
    """

    runs: tuple[tuple[str, dict[str, Any]], ...]
    owner: int | None = None
    stays: bool = False

    def __call__(self) -> None:
        """Runs them one after the other."""
        if self.owner is not None:
            # Ctrl-C in the terminal is for the owner, which then tells us.
            with contextlib.suppress(PermissionError):
                os.setsid()
        stops = _Stops()
        try:
            with stops:
                for arm, run in self.runs:
                    if self.owner is None or _exists(self.owner):
                        _run_unless_taken(arm, run)
        except KeyboardInterrupt:
            if stops.told == signal.SIGUSR2:
                stops.requeue()
            while self.stays and stops.told == signal.SIGTERM:
                time.sleep(1)
            raise SystemExit(INTERRUPTED) from None

    def checkpoint(self) -> DelayedSubmission:
        """What submitit puts back into the queue."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def _run_unless_taken(arm: str, run: dict[str, Any]) -> None:
    folder = Path(run["output"])
    with _claimed(folder) as ours:
        if not ours or (folder / RESULT).is_file() or (folder / FAILED).is_file():
            return
        with (folder / LOG).open("a", buffering=1) as log, contextlib.redirect_stderr(log):
            try:
                run_arm(arm, replace(run_from_plain(run), resume=(folder / "run.json").is_file()))
            except Exception as error:
                write_whole(folder / FAILED, f"{error}\n")
                if not isinstance(error, BlockgateError):
                    log.write(traceback.format_exc())


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


class _Stops:
    """Turns the signals that stop a job into Ctrl-C, which training defers until it has saved its state."""

    def __init__(self) -> None:
        self.told: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGUSR2, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        self._before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requeue(self) -> None:
        """What submitit does on SIGUSR2; ends the process."""
        handler = self._before[signal.SIGUSR2]
        if callable(handler):
            handler(signal.SIGUSR2, None)

    def _note(self, number: int, _: FrameType | None) -> None:
        # A second signal must not look like a second Ctrl-C, which doesn't wait for the state to be saved.
        if self.told is None:
            self.told = number
            signal.raise_signal(signal.SIGINT)


def is_claimed(folder: Path) -> bool:
    """Whether a process on this machine is at work in a folder."""
    if not (folder / ".lock").is_file():
        return False
    with _claimed(folder) as free:
        return not free


@contextlib.contextmanager
def _claimed(folder: Path) -> Iterator[bool]:
    """Whether this process may work in a folder; the system takes the claim back however the process ends."""
    try:
        import fcntl
    except ImportError:
        raise BlockgateError("blockgate reproduce needs Linux or macOS: it locks the folders it works in.") from None

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
