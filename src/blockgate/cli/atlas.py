"""`blockgate atlas`: one interactive page about what the gates of a trained model do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from blockgate.cli.output import use_threads
from blockgate.errors import invalid
from blockgate.find import named_gates
from blockgate.lab.training import load_trained, read_history, record_tour
from blockgate.schedule import set_sparsity

__all__ = ["Atlas"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Atlas:
    """Draws the gate atlas of a trained model: one page for a browser, which needs no network.

    It maps the blocks of every gated matrix (how often each opens, how large its gate is), lights those that each word
    or image opens, and compares words or classes by the blocks they share.

    For example:
        blockgate atlas runs/half
        blockgate atlas runs/half --text "the price of oil fell" --output oil.html
    """

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """Folder of a run (its best checkpoint is used), or a checkpoint file."""
    output: Path = Path("atlas.html")
    """The page to write."""
    text: str | None = None
    """Text for a language model to read. Default: the beginning of the data."""
    tokens: int = 60
    """How many words or images to step through without --text."""
    rows: int = 20_000
    """How many words or images of the data to count."""
    part: Literal["valid", "test"] = "test"
    """Which part of the data."""
    sparsity: float | None = None
    """Another sparsity for all gates. Default: that of the checkpoint."""
    data: str | None = None
    """Another data set, or your own folder. Default: the data of the training."""
    data_dir: Path | None = None
    """Folder of the published data sets. Default: BLOCKGATE_DATA, or a folder in your cache."""
    threads: int | None = None
    """CPU threads. Default: torch's own number."""

    def run(self) -> None:
        """Writes the page and prints its path."""
        use_threads(self.threads)
        if self.output.suffix.lower() not in {".html", ".htm"}:
            raise invalid("--output", expected="a name that ends in .html", got=str(self.output), remedy="Choose one.")
        trained = load_trained(self.checkpoint)
        named_gates(trained.model)
        if self.sparsity is not None:
            set_sparsity(trained.model, self.sparsity)
        run = replace(trained.run, data=self.data or trained.run.data, data_dir=self.data_dir or trained.run.data_dir)
        tour = record_tour(trained._replace(run=run), self.part, rows=self.rows, tokens=self.tokens, text=self.text)
        page = tour.record.to_html(
            self.output,
            tokens=tour.tokens,
            class_names=tour.class_names,
            history=read_history(trained.file.parent / "epochs.csv"),
            title=f"Gate atlas of {trained.file.resolve().parent.name}",
        )
        print(page)
