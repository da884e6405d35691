"""How gates use their blocks while they train: the share that depends on the input, and the share that is dead."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockgate.checkpoint.atomic import replace_whole
from blockgate.lab.reproduce.arms import Arm
from blockgate.lab.reproduce.density import described

__all__ = ["draw_use"]

FACTS = {"input_dependent": "blocks that depend on the input", "dead_blocks": "blocks that no word opens"}


def draw_use(arms: Sequence[Arm], results: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """Draws both shares of all blocks after every epoch, on the validation data, the mean of all seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots(1, len(FACTS), sharex=True)
    for axis, (fact, title) in zip(axes, FACTS.items(), strict=True):
        for arm in arms:
            runs = [result["epochs"] for result in results.get(arm.name, [])]
            if not runs or fact not in runs[0][0]:
                continue
            rows = list(zip(*runs, strict=True))
            values = [100 * statistics.mean(of_seed[fact] for of_seed in row) for row in rows]
            label = described(arm, results[arm.name])
            axis.plot([row[0]["epoch"] for row in rows], values, "o-", label=label, linewidth=1.2)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("epoch", fontsize=8)
        axis.set_ylim(0, 100)
        axis.grid(alpha=0.3)
        axis.yaxis.set_major_formatter("{x:.0f}%")
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend(fontsize=7)
    with replace_whole(file) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
