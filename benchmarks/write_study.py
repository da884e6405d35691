"""Writes the reports and pictures of benchmarks/study again from its result files, without any training.

    python benchmarks/write_study.py laptop/table2 laptop/ablations

Each name is a scale and a table of `blockgate reproduce`; all that have a report there if none is given.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from blockgate.lab.reproduce import EXPERIMENTS, Order, arms_of
from blockgate.lab.reproduce.order import write_up

STUDY = Path(__file__).parent / "study"


def write(scale: str, experiment: str, study: Path = STUDY) -> Path:
    """Writes one report, and returns its file."""
    folder = study / scale
    results = {
        arm.name: [json.loads(file.read_text()) for file in sorted((folder / arm.name).glob("seed-*.json"))]
        for arm in arms_of(experiment, scale)
    }
    times = folder / f"times-{experiment}.json"
    order = Order(experiment=experiment, scale=scale)  # type: ignore[arg-type]
    text = write_up(order, results, json.loads(times.read_text()) if times.is_file() else None, folder)
    report = folder / f"{experiment}.md"
    report.write_text(text)
    return report


if __name__ == "__main__":
    there = [
        f"{scale}/{name}"
        for scale in ("laptop", "paper")
        for name, experiment in EXPERIMENTS.items()
        if experiment.draw is None and (STUDY / scale / f"{name}.md").is_file()
    ]
    for name in sys.argv[1:] or there:
        print(write(*name.split("/")))
