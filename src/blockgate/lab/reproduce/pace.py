"""Quality against training time: how long each arm took to reach given perplexities."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from blockgate.checkpoint.atomic import replace_whole
from blockgate.errors import invalid
from blockgate.inspect.table import markdown_table, to_percent
from blockgate.lab.reproduce.arms import Arm
from blockgate.lab.reproduce.density import described, mean_density

__all__ = ["CLOCKS", "check_levels", "draw_pace", "pace_section", "time_to"]

# What time means, and the column of a run's epochs that has it.
CLOCKS = {"wall": "seconds", "processor": "cpu_seconds"}

MINUTE = 60


class Mark(NamedTuple):
    """A run after one epoch: seconds since its beginning, and the metric on the validation data."""

    seconds: float
    score: float


def check_levels(levels: Sequence[float]) -> None:
    """Raises unless all are positive numbers."""
    for level in levels:
        if not 0 < level < math.inf:
            raise invalid("--levels", expected="positive numbers", got=level, remedy="Such as --levels 130 120 115.")


def time_to(level: float, marks: Sequence[Mark]) -> float | None:
    """Seconds until a run first reaches a level; None if it never does.

    Between the ends of two epochs the logarithm of the metric is taken for a line; before the end of the first nothing
    is known, and a level that is reached there counts as reached at its end.
    """
    if marks and marks[0].score <= level:
        return marks[0].seconds
    for before, after in itertools.pairwise(marks):
        if after.score <= level:
            way = math.log(before.score / level) / math.log(before.score / after.score)
            return before.seconds + way * (after.seconds - before.seconds)
    return None


def pace_section(
    arms: Sequence[Arm],
    results: dict[str, list[dict[str, Any]]],
    metric: str,
    levels: Sequence[float],
    clock: str = "wall",
) -> str:
    """Markdown: minutes of training until each arm reaches each level, and how many times sooner than the dense model.

    The dense model is the one of the same task, with dropout or without, that is there first.

    Args:
        arms: the rows; those without results are left out.
        results: by the name of the arm.
        metric: of the validation data.
        levels: of the metric, in the order of the columns.
        clock: one of CLOCKS.
    """
    arms = [arm for arm in arms if results.get(arm.name)]
    if not arms:
        return ""
    times = {arm: [_mean_time(level, results[arm.name], metric, clock) for level in levels] for arm in arms}
    rows = []
    for arm in arms:
        dense = [times[other] for other in arms if other.family == "dense" and other.task == arm.task]
        first = [min(filter(None, column), default=None) for column in zip(*dense, strict=True)] or [None] * len(levels)
        compared = [None] * len(levels) if arm.family == "dense" else first
        asked = "-" if arm.percent is None else f"{arm.percent}%"
        cells = [_cell(mine, theirs) for mine, theirs in zip(times[arm], compared, strict=True)]
        epoch = statistics.mean(_seconds(result, clock)[-1] / len(result["epochs"]) for result in results[arm.name])
        minutes = f"{epoch / MINUTE:.1f}"
        rows.append([arm.task, arm.label, asked, to_percent(mean_density(results[arm.name])), minutes, *cells])
    head = ["task", "model", "sparsity", "density", "minutes an epoch", *(f"to {level:g}" for level in levels)]
    of_arms = [result["machine"] for arm in arms for result in results[arm.name]]
    machines = sorted({f"{machine['cpu']}, {machine['threads']} thread(s)" for machine in of_arms})
    text = (
        f"## Minutes of training to a valid {metric}\n\n"
        f"Minutes by the {'clock on the wall' if clock == 'wall' else 'processor, in which pauses do not count'}, "
        "validation included, the mean of all seeds that reach the level; in brackets how many times sooner than the "
        "dense model of the same task. Between the ends of two epochs the logarithm of the metric is taken for a line. "
        f"{'; '.join(machines)}.\n\n" + markdown_table(head, rows)
    )
    return text if len(machines) == 1 else text + "\n**Not all arms ran on the same machine: compare with care.**\n"


def draw_pace(
    arms: Sequence[Arm],
    results: dict[str, list[dict[str, Any]]],
    metric: str,
    levels: Sequence[float],
    file: Path,
    clock: str = "wall",
) -> None:
    """Draws the metric on the validation data against minutes of training, a line for each arm's mean over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axis = figure.subplots()
    for arm in arms:
        runs = [_marks(result, metric, clock) for result in results.get(arm.name, [])]
        if runs:
            rows = list(zip(*runs, strict=True))
            minutes = [statistics.mean(mark.seconds for mark in row) / MINUTE for row in rows]
            scores = [statistics.mean(mark.score for mark in row) for row in rows]
            axis.plot(minutes, scores, ".-", label=described(arm, results[arm.name]), linewidth=1.2)
    for level in levels:
        axis.axhline(level, color="black", linewidth=0.6, linestyle=":")
    axis.set_yscale("log")
    axis.set_xlabel(f"minutes of training{'' if clock == 'wall' else ', of the processor'}")
    axis.set_ylabel(f"valid {metric}")
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=7)
    with replace_whole(file) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def _seconds(result: dict[str, Any], clock: str) -> list[float]:
    """Since the beginning, after every epoch."""
    column = CLOCKS[clock]
    if any(column not in row for row in result["epochs"]):
        raise invalid(
            "--clock",
            expected=f"results with {column} of every epoch",
            got=f"{result['arm']}, seed {result['seed']}, without",
            remedy="Use --clock wall, or delete the arm's folder to train it again.",
        )
    return list(itertools.accumulate(row[column] for row in result["epochs"]))


def _marks(result: dict[str, Any], metric: str, clock: str) -> list[Mark]:
    scores = [row[f"valid_{metric}"] for row in result["epochs"]]
    return [Mark(*mark) for mark in zip(_seconds(result, clock), scores, strict=True)]


def _mean_time(level: float, results: Sequence[dict[str, Any]], metric: str, clock: str) -> float | None:
    times = [time_to(level, _marks(result, metric, clock)) for result in results]
    return statistics.mean(filter(None, times)) if any(times) else None


def _cell(seconds: float | None, dense: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds / MINUTE:.1f}" + ("" if dense is None else f" ({dense / seconds:.2f}x)")
