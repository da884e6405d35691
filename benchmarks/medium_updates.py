"""How long an update of each arm of `blockgate reproduce medium` and `medium-qrnn` takes, and so an arm.

    python benchmarks/medium_updates.py benchmarks/results/medium-updates_NAME

writes NAME.json and NAME.md. One thread, as the arms have. It counts seconds of the processor, which pauses and other
programs touch little: enough to plan by, and no benchmark.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import blockgate as bg
from blockgate.inspect.table import markdown_table
from blockgate.lab.bench import machine
from blockgate.lab.data import load_corpus
from blockgate.lab.reproduce import EXPERIMENTS, arms_of, run_of
from blockgate.lab.training import shipped_configs
from blockgate.lab.training.gate_health import has_gates
from blockgate.lab.training.optimizer import make_optimizer
from blockgate.lab.training.tasks import make_task

# Updates before those that are timed, and those.
WARM, TIMED = 1, 3
HOUR = 3600


def time_updates(run: Any, task: Any) -> float:
    """Seconds of the processor that an update takes, the median of a few, at the sparsity that the run ends with."""
    torch.manual_seed(1)
    model = task.make_model()
    if has_gates(model):
        bg.set_sparsity(model, run.model.gate.sparsity)
    optimizer = make_optimizer(model, run.optimizer)
    carried, seconds = None, []
    for batch in task.plan(0)[: WARM + TIMED]:
        began = time.process_time()
        step = task.learn(model.train(), batch, carried, torch.device("cpu"))
        step.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
        carried = step.carried
        seconds.append(time.process_time() - began)
    return statistics.median(seconds[WARM:])


def main(target: Path) -> None:
    """Times every arm once, and writes both files."""
    torch.set_num_threads(1)
    configs, found = shipped_configs(), []
    for name in ("medium", "medium-qrnn"):
        for arm in arms_of(name, "laptop"):
            base = configs[f"{arm.task}-laptop"]
            words = len(load_corpus(base.data, base.data_dir).vocabulary)
            run = run_of(arm, base, words)
            task = make_task(run)
            seconds, updates = time_updates(run, task), len(task.plan(0))
            facts = {"arm": arm.name, "label": arm.label, "percent": arm.percent, "seconds": seconds}
            seeds = EXPERIMENTS[name].seeds.get(arm.name, 1)
            facts |= {"updates": updates, "epochs": run.epochs, "seeds": seeds, "task": arm.task}
            facts["hours"] = seconds * updates * run.epochs / HOUR
            found.append(facts)
            print(f"{arm.name:<36}{seconds:.2f} s an update, {facts['hours']:.1f} hours", flush=True)
    described = machine.describe()
    target.with_suffix(".json").write_text(json.dumps({"machine": described, "arms": found}, indent=1) + "\n")
    target.with_suffix(".md").write_text(report(found, described))


def report(arms: list[dict[str, Any]], described: dict[str, Any]) -> str:
    """In Markdown."""
    rows = [
        [
            one["task"],
            one["label"],
            "-" if one["percent"] is None else f"{one['percent']}%",
            f"{one['seconds']:.2f}",
            str(one["updates"]),
            str(one["epochs"]),
            str(one["seeds"]),
            f"{one['hours']:.1f}",
        ]
        for one in arms
    ]
    head = ["task", "model", "sparsity", "seconds an update", "updates an epoch", "epochs", "runs", "hours a run"]
    total = sum(one["hours"] * one["seeds"] for one in arms)
    return (
        "# Training at a published size: how long an arm takes\n\n"
        f"Estimates: medians of {TIMED} updates at the final sparsity, without validation, in seconds of the processor "
        f"and beside other work. {described['cpu']}, one thread, {described['instruction set']}, "
        f"torch {described['torch']}, commit {described['commit']}. All runs together: "
        f"{total:.0f} hours of one core.\n\n" + markdown_table(head, rows)
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
