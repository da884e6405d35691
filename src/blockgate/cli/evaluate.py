"""`blockgate evaluate`: how well a trained model does."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from blockgate.cli.output import print_facts, use_threads
from blockgate.grid import check_size
from blockgate.lab.training import evaluate, load_trained

__all__ = ["Evaluate"]

# Up to this share of words that the vocabulary lacks goes without a word.
MOST_MISSING = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluate:
    """Measures a trained model: perplexity of a language model, error of an image network, density of gates.

    For example:
        blockgate evaluate runs/half
        blockgate evaluate runs/half/last.pt --part valid --sparsity 0.75 --json
    """

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """Folder of a run (its best checkpoint is used), or a checkpoint file."""
    part: Literal["valid", "test"] = "test"
    """What to measure on."""
    sparsity: float | None = None
    """Another sparsity for all gates. Default: that of the checkpoint."""
    batch_size: int | None = None
    """Sequences or images at once. Fewer, longer sequences lose less context. Default: as in training."""
    data: str | None = None
    """Another data set, or your own folder. Default: the data of the training."""
    data_dir: Path | None = None
    """Folder of the published data sets. Default: BLOCKGATE_DATA, or a folder in your cache."""
    threads: int | None = None
    """CPU threads. Default: torch's own number."""
    json: bool = False
    """Print JSON, for scripts."""

    def run(self) -> None:
        """Prints one fact a line."""
        use_threads(self.threads)
        if self.batch_size is not None:
            check_size("--batch-size", self.batch_size)
        trained = load_trained(self.checkpoint)
        run = replace(
            trained.run,
            data=self.data or trained.run.data,
            data_dir=self.data_dir or trained.run.data_dir,
            eval_batch_size=trained.run.eval_batch_size if self.batch_size is None else self.batch_size,
        )
        facts: dict[str, str | float] = {"checkpoint": str(trained.file), "data": run.data, "part": self.part}
        facts |= evaluate(trained._replace(run=run), self.part, sparsity=self.sparsity)
        missing = facts.get("missing_words", 0.0)
        if isinstance(missing, float) and missing > MOST_MISSING:
            print(
                f"warning: the model's vocabulary lacks {missing:.0%} of the words, and its perplexity says little. "
                "Train a model on texts of this kind.",
                file=sys.stderr,
            )
        print_facts(facts, as_json=self.json)
