"""`blockgate demo`: trains small models, dense and gated, times them, and shows what came out."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from blockgate.cli.output import print_markdown
from blockgate.cli.usage import program
from blockgate.lab.demo import DemoOrder, results_table, run_demo, speed_sentence, write_page

__all__ = ["Demo"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Demo:
    """Shows the whole method in three to four minutes on two CPU cores; needs no data, no network and no GPU.

    Trains three small language models on Python's own documentation (dense, and dynamic sparse at 50% and 90%), packs
    and times them, prints a table and writes report.html with plots. Speeds are compared with the fastest way to run
    the dense model, and are not shown if other programs were busy. A second run replaces the first; Ctrl-C ends
    with code 130 and leaves checkpoints of what was trained.

    For example:
        blockgate demo
        blockgate demo --threads 1 --output one-thread
        blockgate demo --quick --json
    """

    output: Path = Path("blockgate-demo")
    """Folder for report.html, numbers.json and the trained models; other files in it are left alone."""
    quick: bool = False
    """Tiny models and hardly any training: only to see that everything works."""
    seed: int = 1
    """Seed of all random numbers."""
    threads: int | None = None
    """CPU threads. Default: torch's own number."""
    json: bool = False
    """Print the numbers as JSON instead of the table, for scripts."""

    def run(self) -> None:
        """Runs, with progress on stderr, and prints the table."""
        order = DemoOrder(
            output=self.output,
            quick=self.quick,
            seed=self.seed,
            threads=self.threads,
            command=shlex.join(["blockgate", *sys.argv[1:]]),
            program=program(),
        )
        try:
            numbers, trace = run_demo(order)
        except KeyboardInterrupt:
            kept = f"checkpoints of what was trained are in {self.output / 'runs'}, no new report was written"
            raise KeyboardInterrupt(kept) from None
        page = write_page(numbers, trace, self.output)
        if self.json:
            print(json.dumps(numbers, indent=1))
        else:
            print_markdown(results_table(numbers))
            print(speed_sentence(numbers))
        console = Console(stderr=True)
        console.print(f"report: {page}", highlight=False, soft_wrap=True, markup=False)
        sparsest = shlex.quote(str(self.output / "runs" / numbers["arms"][-1]["name"]))
        console.print(
            f"next:   {program()} generate {sparsest} --words 40", highlight=False, soft_wrap=True, markup=False
        )
