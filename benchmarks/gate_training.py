"""Measures what the gates of `blockgate reproduce gates` cost in training: one update of each arm, timed in turns.

    python benchmarks/gate_training.py --output benchmarks/results/gate-training_epyc-avx512_1-thread

An update is forward and backward pass, clipping, Adam, and reviving where the arm has it, on batches of Penn Treebank
at a sparsity that stays. Writes OUTPUT.json and OUTPUT.md. Let nothing else run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from blockgate.inspect.table import markdown_table
from blockgate.inspect.timing import interleave
from blockgate.lab.bench import machine, report
from blockgate.lab.reproduce.arms import NO_DROPOUT, Arm, run_of
from blockgate.lab.training import loop, shipped_configs
from blockgate.lab.training.config import RampConfig

TASKS = ("ptb-qrnn", "ptb-lstm")
KINDS = ("dynamic-best", "topk-thin", "margin")
# A ramp starts at the first of these.
PERCENTS = (0, 50, 90)


def updates_of(arm: Arm, folder: Path) -> Callable[[], None]:
    """A call that makes the next update of an arm."""
    base = replace(shipped_configs()[f"{arm.task}-laptop"], accelerator="cpu", threads=1, output=folder / arm.name)
    training = loop._Training(replace(run_of(arm, base), ramp=RampConfig()), [], {}, quiet=True)
    training.model.train()
    batches = training.task.plan(0)
    turn = itertools.cycle(batches)
    return lambda: training._update(next(turn), len(batches))


def measure(task: str, seconds: float, folder: Path) -> list[dict[str, Any]]:
    """Times of every arm of a task."""
    arms = [Arm(task, f"dense{NO_DROPOUT}")]
    arms += [Arm(task, f"{kind}{NO_DROPOUT}", percent) for percent in PERCENTS for kind in KINDS]
    timings = interleave({arm.name: updates_of(arm, folder) for arm in arms}, seconds=seconds)
    return [{"task": task, "kind": arm.family, "percent": arm.percent, **asdict(timings[arm.name])} for arm in arms]


def markdown(data: dict[str, Any]) -> str:
    """A row for each task and sparsity: time of an update, and what others take beside the former default."""
    medians = {(r["task"], r["kind"], r["percent"]): r["median"] for r in data["results"]}
    rows = []
    for task, percent in itertools.product(TASKS, PERCENTS):
        dense, former, thin, margin = (
            medians[task, kind, None if kind == "dense" else percent] for kind in ("dense", *KINDS)
        )
        rows.append([
            task,
            f"{percent}%",
            f"{1000 * dense:.1f} ms",
            f"{1000 * former:.1f} ms",
            f"{1000 * margin:.1f} ms",
            f"{margin / former - 1:+.0%}",
            f"{thin / former - 1:+.0%}",
        ])
    head = ["task", "sparsity", "dense", "topk, squares", "margin, thin, revived", "margin over topk", "shape only"]
    facts = "; ".join(f"{name} {value}" for name, value in data["machine"].items())
    return (
        f"# Training with margin gates and with the former default\n\n`{data['command']}`\n\n{facts}; load average "
        f"{data['load']:.1f} at the start.\n\nMedian time of an update (20 x 35 words), all arms of a task in turns in "
        "one run. Shape only: topk with thin blocks over topk with squares.\n\n" + markdown_table(head, rows) + "\n"
    )


def main() -> None:
    """Measures, and writes both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="for each arm")
    parser.add_argument("--output", type=Path, required=True, help="path of the files without .json and .md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        results = [row for task in TASKS for row in measure(task, options.seconds, Path(folder))]
    data = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine.describe(),
        "load": load,
        "results": results,
    }
    print("wrote", *report.write_report(options.output, markdown(data), data))


if __name__ == "__main__":
    main()
