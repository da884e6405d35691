"""The paper's Figure 1: which blocks open for which digit."""

from __future__ import annotations

from pathlib import Path

from blockgate.inspect import draw_classes
from blockgate.inspect.table import markdown_table, to_percent
from blockgate.lab.reproduce.arms import Arm
from blockgate.lab.reproduce.experiment import Experiment
from blockgate.lab.reproduce.experiments import mnist
from blockgate.lab.training import Trained, record_test

__all__ = ["EXPERIMENT"]


def _arms(scale: str) -> list[Arm]:
    return [arm for arm in mnist.EXPERIMENT.arms(scale) if arm.facts.is_dynamic]


def _draw(models: dict[Arm, Trained], folder: Path) -> str:
    """Draws, for each MNIST net, how often each block opens for each digit; returns a report in Markdown."""
    rows = []
    for arm, trained in models.items():
        record = record_test(trained)
        draw_classes(record, folder / f"figure1-{arm.name}.png")
        for layer, overlap in record.overlap().items():
            shares = (record.gates[layer].measured_density, overlap.within_classes, overlap.between_classes)
            rows.append([arm.name, layer, *map(to_percent, shares)])
    return (
        "# Figure 1: blocks that open for each class\n\n"
        "Names end with the sparsity that was asked for; density is the share of blocks that opens, as measured. Open "
        "blocks that two test images have in common, of the same class and of different ones:\n\n"
        + markdown_table(["model", "layer", "density", "same class", "different classes"], rows)
    )


EXPERIMENT = Experiment(name="figure1", about="gates by class", arms=_arms, draw=_draw)
