"""The paper's figures from trained models: which blocks open for which class, and how many depend on the input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from blockgate.checkpoint.atomic import write_whole
from blockgate.inspect import GateRecord, draw_classes, draw_distribution, record_gates
from blockgate.inspect.table import markdown_table, to_percent
from blockgate.lab.reproduce.arms import Arm
from blockgate.lab.training import Trained
from blockgate.lab.training.tasks import ImageTask, make_task

__all__ = ["draw_figure1", "draw_figure2"]


def draw_figure1(models: dict[Arm, Trained], folder: Path) -> str:
    """Draws, for each MNIST net, how often each block opens for each digit; returns a report in Markdown."""
    rows = []
    for arm, trained in models.items():
        record = _record(trained)
        draw_classes(record, folder / f"figure1-{arm.name}.png")
        for layer, overlap in record.overlap().items():
            rows.append([arm.name, layer, to_percent(overlap.within_classes), to_percent(overlap.between_classes)])
    return (
        "# Figure 1: blocks that open for each class\n\n"
        "Open blocks that two test images have in common, of the same class and of different ones:\n\n"
        + markdown_table(["model", "layer", "same class", "different classes"], rows)
    )


def draw_figure2(models: dict[Arm, Trained], folder: Path) -> str:
    """Draws how many blocks of each layer depend on the input; returns a report in Markdown.

    The report has the models of earlier calls too.
    """
    file = folder / "figure2.json"
    data: dict[str, dict[str, dict[str, float]]] = json.loads(file.read_text()) if file.is_file() else {}
    for arm, trained in models.items():
        record = _record(trained)
        draw_distribution(record, folder / f"figure2-{arm.name}.png")
        data[arm.name] = {layer: share._asdict() for layer, share in record.distribution().items()}
    write_whole(file, json.dumps(data, indent=1) + "\n")
    rows = [
        [name, layer, *map(to_percent, share.values())]
        for name, layers in data.items()
        for layer, share in layers.items()
    ]
    return (
        "# Figure 2: blocks that depend on the input\n\n"
        "Always on or off: for at least 95% of the test data. The paper finds at least 60% input-dependent blocks in "
        "every Quasi-RNN layer at 50%.\n\n"
        + markdown_table(["model", "layer", "always on", "input-dependent", "always off"], rows)
    )


@torch.no_grad()
def _record(trained: Trained) -> GateRecord:
    """What the gates decide on the test data, by class where it has some."""
    task: Any = make_task(trained.run, vocabulary=trained.vocabulary)
    with record_gates(trained.model, coactivation=False) as record:
        if isinstance(task, ImageTask):
            with record.labelled(task.parts["test"][1]):
                task.evaluate(trained.model, "test", torch.device("cpu"))
        else:
            task.evaluate(trained.model, "test", torch.device("cpu"))
    return record
