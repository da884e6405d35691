"""How the arms of an experiment learn: one line each, epoch by epoch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockgate.checkpoint.atomic import replace_whole
from blockgate.lab.reproduce.arms import Arm
from blockgate.lab.reproduce.density import described

__all__ = ["draw_curves"]

STYLES = ("-", "--", ":", "-.")


def draw_curves(arms: Sequence[Arm], results: dict[str, list[dict[str, Any]]], metric: str, file: Path) -> None:
    """Draws the metric on the validation data after every epoch, the mean of all seeds, on a logarithmic scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axis = figure.subplots()
    for number, arm in enumerate(arms):
        runs = [result["epochs"] for result in results.get(arm.name, [])]
        if runs:
            rows = list(zip(*runs, strict=True))
            epochs = [row[0]["epoch"] for row in rows]
            values = [statistics.mean(of_seed[f"valid_{metric}"] for of_seed in row) for row in rows]
            # There are ten colours.
            style = STYLES[number // 10 % len(STYLES)]
            axis.plot(epochs, values, style, label=described(arm, results[arm.name]), linewidth=1.2)
    axis.set_yscale("log")
    axis.set_xlabel("epoch")
    axis.set_ylabel(f"valid {metric}")
    axis.grid(alpha=0.3, which="both")
    # Beside the curves: there may be thirty arms.
    figure.legend(loc="outside right upper", fontsize=6)
    with replace_whole(file) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
