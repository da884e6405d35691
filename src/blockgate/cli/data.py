"""`blockgate data`: get the published data sets, and check copies of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from blockgate.errors import invalid
from blockgate.lab.data import SOURCES, data_dir, fetch, load_corpus, load_images, locate

__all__ = ["Data"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Downloads and checks the data sets of the paper: ptb, wikitext-2, mnist.

    `fetch` downloads what isn't there yet; `check` compares the files with the published ones and counts what is in
    them. Training takes any folder of your own with train.txt, valid.txt and test.txt as well.

    For example:
        blockgate data fetch ptb
        blockgate data check ptb wikitext-2 mnist --data-dir ~/data
    """

    action: Annotated[Literal["fetch", "check"], tyro.conf.Positional]
    """What to do."""
    names: Annotated[tuple[Literal["ptb", "wikitext-2", "mnist"], ...], tyro.conf.Positional]
    """Which data sets."""
    data_dir: Path | None = None
    """Their folder. Default: BLOCKGATE_DATA, or a folder in your cache."""
    mirror: str | None = None
    """Another web folder that has the files, such as https://example.org/ptb."""
    json: bool = False
    """Print JSON, for scripts."""

    def run(self) -> None:
        """Does it for one data set after the other."""
        if not self.names:
            remedy = f"Try: blockgate data {self.action} ptb"
            raise invalid("names", expected=f"some of {tuple(SOURCES)}", got="none", remedy=remedy)
        facts = {name: self._one(name) for name in self.names}
        if self.json:
            print(json.dumps(facts, indent=2))

    def _one(self, name: str) -> dict[str, Any]:
        if self.action == "fetch":
            with _DownloadBar(name) as bar:
                fetch(name, self.data_dir, mirror=self.mirror, progress=bar)
        folder = next(iter(locate(name, self.data_dir).values())).parent
        facts = {"folder": str(folder)} | _statistics(name, self.data_dir)
        if not self.json:
            print(f"{name}: the published files, in {folder}")
            for what, counts in facts.items():
                if isinstance(counts, dict):
                    print(f"  {what:<6}" + "".join(f"{number:>12,} {unit}" for unit, number in counts.items()))
        return facts


def _statistics(name: str, folder: Path | None) -> dict[str, Any]:
    if "train" in SOURCES[name].files:
        corpus = load_corpus(name, folder)
        return corpus.statistics() | {"vocabulary": {"types": len(corpus.vocabulary)}}
    images = load_images(name, data_dir(folder))
    return {"train": {"images": len(images.train[0])}, "test": {"images": len(images.test[0])}}


class _DownloadBar:
    """A rich bar behind the interface that pooch reports to: one bar, started again for every file."""

    def __init__(self, name: str) -> None:
        columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(name, total=None)

    @property
    def total(self) -> int:
        """Bytes of the file."""
        return int(self._bar.tasks[0].total or 0)

    @total.setter
    def total(self, size: int) -> None:
        self._bar.reset(self._task, total=size)

    def update(self, count: int) -> None:
        """Moves on by `count` bytes."""
        self._bar.advance(self._task, count)

    def reset(self) -> None:
        """Starts again from 0."""
        self._bar.update(self._task, completed=0)

    def close(self) -> None:
        """One file is done; the bar ends with the last."""

    def __enter__(self) -> _DownloadBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
