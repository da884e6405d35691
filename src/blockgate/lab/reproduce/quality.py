"""Quality against measured time: the comparison a user decides by, as a table and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from blockgate.checkpoint.atomic import replace_whole
from blockgate.inspect.table import markdown_table
from blockgate.lab.reproduce.arms import Arm
from blockgate.lab.reproduce.density import asked_and_open
from blockgate.lab.reproduce.timing import ENGINES, PACKED

__all__ = ["Point", "draw_quality", "points_of", "quality_section"]


class Point(NamedTuple):
    """An arm, run in one way: seconds per token, and its mean score on the test data (of that way, where measured).

    `level` is the sparsity that was asked for and what is open, in words.
    """

    arm: Arm
    engine: str
    seconds: float
    score: float
    level: str = ""


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
            yield Point(arm, engine, parts["model"]["median"], score, asked_and_open(arm, results[arm.name]))


def fastest(points: Sequence[Point], arm: Arm) -> Point:
    """The fastest way to run an arm."""
    return min((point for point in points if point.arm == arm), key=lambda point: point.seconds)


def quality_section(points: Sequence[Point], metric: str, form: str) -> str:
    """Markdown: beside each dynamic arm the best pruned, small and dense one that is no slower, each at its fastest."""
    arms = list(dict.fromkeys(point.arm for point in points))
    best = [fastest(points, arm) for arm in arms]
    rows = []
    for ours in best:
        if ours.arm.facts.is_dynamic:
            rivals = [
                min((p for p in best if _rival(p, ours, kind)), key=lambda p: p.score, default=None)
                for kind in ("agp", "small", "dense")
            ]
            rows.append([
                ours.arm.task,
                f"{ours.arm.label}, {ours.level}",
                f"{ours.seconds * 1e6:.1f} ({ours.engine})",
                form.format(ours.score),
                *("none" if rival is None else _described(rival, form) for rival in rivals),
            ])
    if not rows:
        return ""
    head = ["task", "model", "microseconds a token", f"test {metric}", "best pruned (AGP)", "best small dense", "dense"]
    return (
        "## Quality at equal time\n\n"
        "Every model in its fastest way; beside each gated one, the best of each kind that is no slower.\n\n"
        + markdown_table(head, rows)
    )


def _rival(point: Point, ours: Point, kind: str) -> bool:
    return point.arm.family == kind and point.arm.task == ours.arm.task and point.seconds <= ours.seconds


def _described(point: Point, form: str) -> str:
    arm = point.arm
    which = [point.level] * bool(point.level) + ["no dropout"] * (arm.kind != arm.family)
    score = f"{form.format(point.score)} in {point.seconds * 1e6:.1f} ({point.engine})"
    return f"{', '.join(which)}: {score}" if which else score


def draw_quality(points: Sequence[Point], metric: str, file: Path) -> None:
    """One panel for each type of packed weights; pruned single weights by the faster of that and CSR."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(PACKED), 4.0), layout="constrained")
    axes = figure.subplots(1, len(PACKED), sharey=True, squeeze=False)[0]
    for axis, engine in zip(axes, PACKED, strict=True):
        for kind in dict.fromkeys(point.arm.kind for point in points if point.arm.facts.look):
            shown = [_shown(points, arm, engine) for arm in dict.fromkeys(p.arm for p in points) if arm.kind == kind]
            found = [point for point in shown if point is not None]
            x, y = [point.seconds * 1e6 for point in found], [point.score for point in found]
            arm = found[0].arm if found else None
            if arm is not None and arm.facts.look is not None:
                colour, mark = arm.facts.look
                fill = "full" if arm.kind == arm.family else "none"
                label = arm.label if engine == "int8" else None
                axis.plot(x, y, mark, linestyle=":", color=colour, fillstyle=fill, label=label)
            for point in found:
                if point.level:
                    axis.annotate(
                        point.level,
                        (point.seconds * 1e6, point.score),
                        xytext=(4, 4),
                        textcoords="offset points",
                        fontsize=7,
                    )
        axis.set_title(f"packed to {engine}", fontsize=9)
        axis.set_xlabel("microseconds a token, whole model, batch 1", fontsize=8)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"test {metric}", fontsize=8)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    with replace_whole(file) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def _shown(points: Sequence[Point], arm: Arm, engine: str) -> Point | None:
    engines = {engine, "CSR"} & set(ENGINES)
    return min((p for p in points if p.arm == arm and p.engine in engines), key=lambda p: p.seconds, default=None)
