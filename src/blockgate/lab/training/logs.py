"""What a run leaves to read: a table of epochs, TensorBoard curves, a progress bar and a line per epoch."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockgate.checkpoint.atomic import write_whole

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["LINE_SECONDS", "Lines", "RunLog"]

# Where no bar can be drawn, progress is a line every so many seconds; in a long epoch, whenever the time since its
# beginning has grown by so large a share: logs of long runs stay short.
LINE_SECONDS, LINE_SHARE = 10.0, 0.05


class Lines:
    """Progress as lines, for files and pipes, where no bar can be drawn: how much is done, and how long the rest takes.

    Args:
        title: what goes on.
        total: steps that there are.
        done: of them, at the beginning.
        say: prints a line.
        clock: the time now, in seconds.
    """

    def __init__(
        self,
        title: str,
        total: int,
        *,
        done: int = 0,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.title, self.total, self.first, self.say, self.clock = title, total, done, say, clock
        self.began = self.said = clock()

    def update(self, done: int) -> None:
        """A line if the last one was long ago."""
        now = self.clock()
        if now - self.said < max(LINE_SECONDS, LINE_SHARE * (now - self.began)) or done <= self.first:
            return
        self.said = now
        left = (self.total - done) * (now - self.began) / (done - self.first)
        self.say(f"{self.title}: {done} of {self.total}, about {left:.0f} seconds left")


class RunLog:
    """The logs of one process; only the first of several writes and shows anything.

    Args:
        folder: of the run; None to write nothing.
        first_update: the update that a resumed run goes on from; later points of the curves are dropped.
        quiet: show nothing.
    """

    def __init__(self, folder: Path | None, *, first_update: int, quiet: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.folder = folder
        self.writer: SummaryWriter | None = None
        if folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_update)
        self.console = Console(stderr=True, quiet=quiet or folder is None)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=self.console.quiet or not self.console.is_terminal,
        )
        self.task = self.bar.add_task("", facts="")
        self.lines: Lines | None = None

    def begin_epoch(self, epoch: int, epochs: int, done: int, batches: int) -> None:
        """Starts the bar at the first batch that is left to do."""
        self.bar.start()
        self.bar.reset(self.task, total=batches, completed=done, description=f"epoch {epoch}/{epochs}", facts="")
        if not self.console.is_terminal:
            self.lines = Lines(f"epoch {epoch}/{epochs}, batches", batches, done=done, say=self.say)

    def advance(self, done: int) -> None:
        """Moves the bar."""
        self.bar.update(self.task, completed=done)
        if self.lines is not None:
            self.lines.update(done)

    def update(self, updates: int, facts: dict[str, float]) -> None:
        """A point of the curves, and the facts beside the bar."""
        self.bar.update(self.task, facts=_line(facts))
        self._curves(facts, updates, "train")

    def epoch(self, rows: list[dict[str, float]]) -> None:
        """The table with one more row, the curves, and a line to read."""
        row = rows[-1]
        self.bar.stop()
        self.console.print(_line(row), highlight=False, soft_wrap=True)
        self._curves(
            {name: value for name, value in row.items() if name not in {"epoch", "updates"}},
            int(row["updates"]),
            "epoch",
        )
        if self.folder is not None:
            text = io.StringIO()
            names = list(dict.fromkeys(name for one in rows for name in one))
            table = csv.DictWriter(text, names, lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
            write_whole(self.folder / "epochs.csv", text.getvalue())

    def say(self, text: str) -> None:
        """A line for people."""
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def write_json(self, name: str, data: dict[str, Any]) -> None:
        """A file of facts in the run's folder."""
        if self.folder is not None:
            write_whole(self.folder / name, json.dumps(data, indent=2, default=str) + "\n")

    def close(self) -> None:
        """Ends the bar and the curves."""
        self.bar.stop()
        if self.writer is not None:
            self.writer.close()

    def _curves(self, facts: dict[str, float], updates: int, group: str) -> None:
        if self.writer is not None:
            for name, value in facts.items():
                self.writer.add_scalar(f"{group}/{name}", value, updates)


def _line(facts: dict[str, float]) -> str:
    return "  ".join(
        f"{name.replace('_', ' ')} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in facts.items()
    )
