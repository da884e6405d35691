"""The paper's Figure 2: how many blocks of each layer depend on the input."""

from __future__ import annotations

import json
from pathlib import Path

from blockgate.checkpoint.atomic import write_whole
from blockgate.inspect import draw_distribution
from blockgate.inspect.table import markdown_table, to_percent
from blockgate.lab.reproduce.arms import Arm
from blockgate.lab.reproduce.experiment import Experiment
from blockgate.lab.reproduce.experiments import table1, table2
from blockgate.lab.training import Trained, record_test

__all__ = ["EXPERIMENT"]

# By layer, and what the table calls them.
FACTS = {
    "density": "density",
    "always_on": "always on",
    "input_dependent": "input-dependent",
    "always_off": "always off",
}


def _arms(scale: str) -> list[Arm]:
    arms = table1.EXPERIMENT.arms(scale) + table2.EXPERIMENT.arms(scale)
    return [arm for arm in arms if arm.facts.is_dynamic]


def _draw(models: dict[Arm, Trained], folder: Path) -> str:
    """Draws how many blocks of each layer depend on the input; returns a report in Markdown.

    The report has the models of earlier calls too.
    """
    file = folder / "figure2.json"
    data: dict[str, dict[str, dict[str, float | None]]] = json.loads(file.read_text()) if file.is_file() else {}
    for arm, trained in models.items():
        record = record_test(trained)
        draw_distribution(record, folder / f"figure2-{arm.name}.png")
        data[arm.name] = {
            layer: {"density": record.gates[layer].measured_density, **share._asdict()}
            for layer, share in record.distribution().items()
        }
    write_whole(file, json.dumps(data, indent=1) + "\n")
    return _report(data)


def _report(data: dict[str, dict[str, dict[str, float | None]]]) -> str:
    """In Markdown, from shares by model and layer."""
    rows = [
        [name, layer, *(to_percent(share.get(fact)) for fact in FACTS)]
        for name, layers in data.items()
        for layer, share in layers.items()
    ]
    return (
        "# Figure 2: blocks that depend on the input\n\n"
        "Names end with the sparsity that was asked for; density is the share of blocks that opens, as measured. "
        "Always on or off: for at least 95% of the test data. The paper finds at least 60% input-dependent blocks in "
        "every Quasi-RNN layer at 50%.\n\n" + markdown_table(["model", "layer", *FACTS.values()], rows)
    )


EXPERIMENT = Experiment(name="figure2", about="gates that depend on the input", arms=_arms, draw=_draw)
