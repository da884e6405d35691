"""What an arm leaves behind: one JSON file with its config, where it ran, its curve, quality and costs."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from blockgate.checkpoint.atomic import write_whole
from blockgate.errors import invalid
from blockgate.lab.bench import machine
from blockgate.lab.models import count_costs
from blockgate.lab.training import Run, load_trained, record_test, train
from blockgate.lab.training.config import differences, run_to_plain
from blockgate.lab.training.gate_health import has_gates

__all__ = ["RESULT", "load_result", "run_arm"]

RESULT = "result.json"


def run_arm(name: str, run: Run) -> dict[str, Any]:
    """Trains an arm, or goes on with it, and writes its result into the folder of the run."""
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    described = machine.describe()
    results = train(run, notes=described)
    result = {
        "arm": name,
        "seed": run.seed,
        "run": run_to_plain(run),
        "machine": described,
        **results,
        **measure(run.output),
        "epochs": _curve(run.output),
    }
    write_whole(run.output / RESULT, json.dumps(result, indent=1) + "\n")
    return result


def measure(folder: Path) -> dict[str, Any]:
    """Costs of the best model of a run, at the densities that its gates have on the test data."""
    trained = load_trained(folder)
    if not has_gates(trained.model):
        return {"costs": asdict(count_costs(trained.model)), "gates": {}}
    record = record_test(trained)
    gates = {
        name: {
            "target_density": gate.target_density,
            "measured_density": gate.measured_density,
            **gate.shares(0.95)._asdict(),
            # Opened by no row at all.
            "dead": float((gate.open_counts == 0).double().mean()),
        }
        for name, gate in record.gates.items()
    }
    densities = {name: float(gate["measured_density"] or 0.0) for name, gate in gates.items()}
    return {
        "costs": asdict(count_costs(trained.model, densities)),
        "gates": gates,
        "gate_warnings": record.warnings(),
    }


def load_result(folder: Path, run: Run) -> dict[str, Any] | None:
    """The result in a folder, None if there is none yet; an error if it is that of another run."""
    file = folder / RESULT
    if not file.is_file():
        return None
    try:
        result: dict[str, Any] = json.loads(file.read_text())
        changed = differences(result["run"], run_to_plain(run))
    except (ValueError, KeyError, TypeError) as error:
        raise invalid(
            "result", expected="a file of blockgate reproduce", got=f"{file}: {error!r}", remedy="Delete it."
        ) from None
    if changed:
        raise invalid(
            f"{file}",
            expected="the result of the run that is asked for",
            got="; ".join(changed),
            remedy="Give another --output, or delete the folder to run the arm again.",
        )
    return result


def _curve(folder: Path) -> list[dict[str, float]]:
    rows = csv.DictReader((folder / "epochs.csv").read_text().splitlines())
    return [{name: float(value) for name, value in row.items() if value} for row in rows]
