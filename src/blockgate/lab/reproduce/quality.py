"""Quality against measured time: the comparison a user decides by, as a table and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from blockgate.checkpoint.atomic import replace_whole
from blockgate.inspect.table import markdown_table
from blockgate.lab.reproduce.arms import Arm
from blockgate.lab.reproduce.density import asked_and_open
from blockgate.lab.reproduce.timing import BATCHES, SCREENED, part_name

__all__ = ["Point", "draw_quality", "points_of", "quality_section"]

# What gated models are compared with, in the order of the columns: pruned, small dense and dense models.
RIVALS: tuple[Callable[[Arm], bool], ...] = (
    lambda arm: arm.family == "agp",
    lambda arm: arm.facts.is_small,
    lambda arm: arm.family == "dense",
)
# Formats that have panels; bfloat16 is in the tables.
DRAWN = ("float32", "int8", "int4")


class Point(NamedTuple):
    """An arm, run in one way: seconds per token, and its mean score on the test data (of that way, where measured).

    `level` is the sparsity that was asked for and what is open, in words; `batch` texts are read side by side.
    """

    arm: Arm
    engine: str
    seconds: float
    score: float
    level: str = ""
    batch: int = 1


def points_of(
    arms: Sequence[Arm], results: dict[str, list[dict[str, Any]]], times: dict[str, Any], metric: str
) -> Iterator[Point]:
    """Every arm that has a result and times, run in every way that was timed."""
    for arm in arms:
        if not results.get(arm.name):
            continue
        trained = statistics.mean(result["test"][metric] for result in results[arm.name])
        first = results[arm.name][0]["test"][metric]
        for engine, parts in times["seconds"].get(arm.name, {}).items():
            measured = times.get("quality", {}).get(arm.name, {}).get(engine, first)
            # Only the first seed's model is packed: what packing costs is taken from it, the rest from all seeds.
            score = trained + measured - first
            # Screening finds the likeliest word; all other times are those of all probabilities.
            part = "likeliest" if engine.endswith(SCREENED) else "model"
            for batch in BATCHES:
                if (timed := parts.get(part_name(part, batch))) is not None:
                    yield Point(arm, engine, timed["median"], score, asked_and_open(arm, results[arm.name]), batch)


def fastest(points: Sequence[Point], arm: Arm) -> Point:
    """The fastest way to run an arm."""
    return min((point for point in points if point.arm == arm), key=lambda point: point.seconds)


def quality_section(points: Sequence[Point], metric: str, form: str) -> str:
    """Markdown: beside each dynamic arm the best pruned, small and dense one that is no slower, each at its fastest."""
    parts = []
    for batch in BATCHES:
        # A likeliest word is less than all probabilities: it is compared in the picture only.
        found = [point for point in points if point.batch == batch and not point.engine.endswith(SCREENED)]
        if rows := _rows(found, form):
            head = ["task", "model", "microseconds a token", f"test {metric}", "best pruned (AGP)", "best small dense"]
            parts.append(
                f"## Quality at equal time{'' if batch == 1 else f', batch {batch}'}\n\n"
                "Every model in its fastest way; beside each gated one, the best of each kind that is no slower.\n\n"
                + markdown_table([*head, "dense"], rows)
            )
    return "\n".join(parts)


def _rows(points: Sequence[Point], form: str) -> list[list[str]]:
    arms = list(dict.fromkeys(point.arm for point in points))
    best = [fastest(points, arm) for arm in arms]
    rows = []
    for ours in best:
        if ours.arm.facts.is_dynamic:
            rivals = [
                min((p for p in best if _rival(p, ours, kind)), key=lambda p: p.score, default=None) for kind in RIVALS
            ]
            rows.append([
                ours.arm.task,
                f"{ours.arm.label}, {ours.level}",
                f"{ours.seconds * 1e6:.1f} ({ours.engine})",
                form.format(ours.score),
                *("none" if rival is None else _described(rival, form) for rival in rivals),
            ])
    return rows


def _rival(point: Point, ours: Point, is_kind: Callable[[Arm], bool]) -> bool:
    return is_kind(point.arm) and point.arm.task == ours.arm.task and point.seconds <= ours.seconds


def _described(point: Point, form: str) -> str:
    arm = point.arm
    which = [point.level] * bool(point.level) + ["no dropout"] * (arm.kind != arm.family)
    score = f"{form.format(point.score)} in {point.seconds * 1e6:.1f} ({point.engine})"
    return f"{', '.join(which)}: {score}" if which else score


def draw_quality(points: Sequence[Point], metric: str, file: Path) -> None:
    """One panel for each type of packed weights and each batch; pruned single weights by the faster of that and CSR.

    Where an output layer can be screened, the likeliest word counts, else the probabilities of all words.
    """
    from matplotlib.figure import Figure

    points = [point for point in points if point.arm.facts.look]
    engines = [engine for engine in DRAWN if any(point.engine == engine for point in points)]
    batches = [batch for batch in BATCHES if any(point.batch == batch for point in points)]
    figure = Figure(figsize=(4.8 * len(engines), 3.6 * len(batches) + 0.6), layout="constrained")
    grid = figure.subplots(len(batches), len(engines), sharey=True, squeeze=False)
    for line, batch in zip(grid, batches, strict=True):
        line[0].set_ylabel(f"test {metric}", fontsize=8)
        for axis, engine in zip(line, engines, strict=True):
            of_batch = [point for point in points if point.batch == batch]
            _draw_panel(axis, of_batch, engine)
            axis.set_title(f"packed to {engine}, batch {batch}", fontsize=9)
    # An arm may be missing from a panel.
    legends = [axis.get_legend_handles_labels() for axis in grid.flat]
    handles = {label: handle for legend in legends for handle, label in zip(*legend, strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle("Beside a point: the sparsity asked for, and the share that is open as measured", fontsize=8)
    with replace_whole(file) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def _draw_panel(axis: Any, points: Sequence[Point], engine: str) -> None:
    ways = set()
    for kind in dict.fromkeys(point.arm.kind for point in points):
        arms = dict.fromkeys(point.arm for point in points if point.arm.kind == kind)
        found = [point for arm in arms if (point := _shown(points, arm, engine)) is not None]
        if not found:
            continue
        arm = found[0].arm
        colour, mark = arm.facts.look or ("", "")
        fill = "full" if arm.kind == arm.family else "none"
        x, y = [point.seconds * 1e6 for point in found], [point.score for point in found]
        axis.plot(x, y, mark, linestyle=":", color=colour, fillstyle=fill, label=arm.label)
        for point in found:
            ways.add("likeliest word, output layer screened" if point.engine.endswith(SCREENED) else "whole model")
            place = {"xytext": (4, 4), "textcoords": "offset points", "fontsize": 6}
            if point.level:
                axis.annotate(point.level.replace(" open", ""), (point.seconds * 1e6, point.score), **place)
    axis.margins(x=0.15)
    axis.set_xlabel(f"microseconds a token, {'; '.join(sorted(ways))}", fontsize=8)
    axis.grid(alpha=0.3)


def _shown(points: Sequence[Point], arm: Arm, engine: str) -> Point | None:
    of_arm = [point for point in points if point.arm == arm]
    screened = [point for point in of_arm if point.engine == engine + SCREENED]
    plain = [point for point in of_arm if point.engine in {engine, "CSR"}]
    return min(screened or plain, key=lambda point: point.seconds, default=None)
