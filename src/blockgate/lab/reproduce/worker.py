"""A process that runs arms, one after the other, taking those that no other process has taken."""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from blockgate.checkpoint.atomic import write_whole
from blockgate.errors import BlockgateError
from blockgate.lab.reproduce.results import RESULT, run_arm
from blockgate.lab.training.config import run_from_plain

__all__ = ["FAILED", "LOG", "main"]

# In the folder of an arm: what went wrong, and what the run has to say.
FAILED, LOG = "failed.txt", "log.txt"

INTERRUPTED = 130


def main(plan: Path) -> int:
    """Runs the arms of a plan, a JSON file with a list of names and runs; returns the exit code."""
    parent = os.getppid()
    try:
        for entry in json.loads(plan.read_text()):
            # Nobody waits for the arms of a process whose parent was killed.
            if os.getppid() != parent:
                return INTERRUPTED
            _run_unless_taken(entry["arm"], Path(entry["run"]["output"]), entry["run"])
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _run_unless_taken(name: str, folder: Path, plain: dict[str, Any]) -> None:
    with _claimed(folder) as ours:
        if not ours or (folder / RESULT).is_file() or (folder / FAILED).is_file():
            return
        with (folder / LOG).open("a", buffering=1) as log, contextlib.redirect_stderr(log):
            try:
                run_arm(name, replace(run_from_plain(plain), resume=(folder / "run.json").is_file()))
            except Exception as error:
                write_whole(folder / FAILED, f"{error}\n")
                if not isinstance(error, BlockgateError):
                    log.write(traceback.format_exc())


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
