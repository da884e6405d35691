"""The demo's pictures as SVG inside the page: colours come from its style sheet, so that they fit light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from blockgate.lab.demo.gates import Trace
from blockgate.lab.demo.verdict import UNRELIABLE

__all__ = ["distribution_chart", "speed_chart", "trace_chart", "training_chart"]

# Drawn this wide, so that texts of 12 can still be read on a phone, whose screen is hardly narrower.
WIDTH = 360.0
LEFT, RIGHT = 44.0, 12.0
TICK = 4.0
BAR = 20.0
TITLE = 22.0
# How dark an open gate is drawn: by quarters of the layer's largest.
SHADES = 4
MOST_TRACE_HEIGHT, BLOCK_HEIGHT = 110.0, 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """From numbers to places: `low` to `first`, `high` to `last`, by their logarithms if `log`."""

    low: float
    high: float
    first: float
    last: float
    log: bool = False

    def __call__(self, value: float) -> float:
        way = math.log if self.log else float
        low, high = way(self.low), way(self.high)
        share = (way(value) - low) / (high - low) if high > low else 0.5
        return self.first + share * (self.last - self.first)


def training_chart(arms: Sequence[dict[str, Any]]) -> str:
    """Perplexity of each arm over the epochs, and below it the sparsity at the same time."""
    curves = [arm["curve"] for arm in arms]
    points = [point for curve in curves for point in curve]
    x = Scale(low=0, high=max(p["epoch"] for p in points), first=LEFT, last=WIDTH - RIGHT)
    values = [p["perplexity"] for p in points]
    low, high = min(values) * 0.92, max(values) * 1.05
    upper = Scale(low=low, high=high, first=200, last=TITLE, log=True)
    lower = Scale(low=0, high=1, first=310, last=244)
    parts = [
        _text(0, 12, "validation perplexity (log scale)"),
        *_y_axis(upper, _log_ticks(low, high), x),
        _text(0, 234, "sparsity: share of closed blocks"),
        *_y_axis(lower, [0, 0.5, 0.9], x, lambda v: f"{v:.0%}"),
        *_x_axis(x, _even_ticks(x.high), 310),
        _text(WIDTH - RIGHT, 342, "epochs", "end"),
    ]
    for number, curve in enumerate(curves):
        parts.append(_line([(x(p["epoch"]), upper(p["perplexity"])) for p in curve], number))
        parts.append(_line([(x(p["epoch"]), lower(p["sparsity"])) for p in curve], number, marks=False))
    ends = ", ".join(f"{arm['label']} {arm['curve'][-1]['perplexity']:.1f}" for arm in arms)
    return _svg(348, f"Validation perplexity falls during training while sparsity rises. At the end: {ends}.", parts)


def speed_chart(layers: dict[str, Any], busy: str | None = None) -> str:
    """Speed-up of the recurrent layers over dense ones by density, and the line that no overhead would give.

    `busy` says why times can't be trusted: then that is shown instead.
    """
    if busy:
        return _svg(
            40,
            f"No speed is shown. {UNRELIABLE}: {busy}.",
            [_text(0, 14, UNRELIABLE, cls="strong"), _text(0, 34, busy)],
        )
    points = layers["points"]
    series = {
        name: [(p["density"], p[key]) for p in points if p["engine"] == engine]
        for name, engine, key in (
            ("int8", "blockgate int8", "speedup"),
            ("fp32", "blockgate fp32", "speedup"),
            ("own", "blockgate fp32", "speedup_over_packed_dense"),
        )
    }
    lowest = min(p["density"] for p in points)
    speeds = [speed for line in series.values() for _, speed in line] + [1, 1 / lowest]
    low, high = min(speeds) * 0.85, max(speeds) * 1.15
    x = Scale(low=lowest * 0.9, high=1.05, first=LEFT, last=WIDTH - RIGHT, log=True)
    y = Scale(low=low, high=high, first=260, last=TITLE, log=True)
    ticks = sorted({t for t in (0.1, 0.25, 0.5, 1.0) if x.low <= t <= x.high})
    parts = [
        _text(0, 12, "times as fast as dense (log scale)"),
        *_y_axis(y, _log_ticks(low, high), x, lambda v: f"{v:g}x"),
        *_x_axis(x, ticks, 260, lambda v: f"{v:.0%}"),
        _text(WIDTH - RIGHT, 295, "density: share of open blocks (log scale)", "end"),
        f'<path class="ideal" d="M{x(lowest):.1f} {y(1 / lowest):.1f}L{x(1):.1f} {y(1):.1f}"/>',
        *(_line([(x(d), y(s)) for d, s in line], number) for number, line in enumerate(series.values())),
    ]
    said = "; ".join(f"{d:.0%} open: {s:.2f} times" for d, s in series["fp32"])
    return _svg(
        301, f"Speed-up of the packed fp32 layers over the fastest dense ones. {said}. Ideal: 1 / density.", parts
    )


def distribution_chart(arms: Sequence[dict[str, Any]]) -> str:
    """One bar for every gate of every gated arm: blocks always on, input dependent, always off."""
    parts, top, said = [], 0.0, []
    start = 118.0
    for arm in arms:
        parts.append(_text(0, top + 14, arm["label"], cls="strong"))
        top += TITLE
        for layer, shares in arm["gates"].items():
            parts.append(_text(start - 8, top + 14, layer, "end"))
            left = start
            for kind, share in shares.items():
                width = share * (WIDTH - start)
                parts.append(_box(left, top, width, BAR - 3, kind.replace("_", "-")))
                if width >= 26:
                    parts.append(
                        _text(left + width / 2, top + 13, f"{share:.0%}", "middle", f"on-{kind.replace('_', '-')}")
                    )
                left += width
            said.append(f"{arm['label']}, {layer}: {shares['input_dependent']:.0%} input dependent")
            top += BAR
        top += 8
    return _svg(top, "; ".join(said) + ".", parts)


def trace_chart(trace: Trace) -> str:
    """Words from left to right; for each layer the blocks that the sentence opens, the most used at the top."""
    x = Scale(low=0, high=len(trace.words), first=0, last=WIDTH)
    parts, top, said = [], 0.0, []
    for layer, gates in trace.gates.items():
        used = (gates != 0).sum(0)
        opened = int(used.count_nonzero())
        said.append(f"{layer} opens {opened} of {gates.shape[1]} blocks")
        parts.append(_text(0, top + 14, f"{layer}: {opened} of {gates.shape[1]} blocks are used"))
        top += TITLE
        height = min(MOST_TRACE_HEIGHT, max(BLOCK_HEIGHT * opened, 12))
        parts.append(_box(0, top, WIDTH, height, "closed"))
        if opened:
            order = used.argsort(descending=True, stable=True)[:opened]
            shades = gates[:, order].div(gates.max()).mul(SHADES).ceil().int().tolist()
            parts += _cells(shades, x, top, height / opened)
        top += height + 8
    middle = (x(1) - x(0)) / 2 + 4
    for number, word in enumerate(trace.words):
        at = x(number) + middle
        parts.append(
            f'<text transform="translate({at:.1f} {top:.1f}) rotate(-90)" text-anchor="end">{escape(word)}</text>'
        )
    longest = max(map(len, trace.words))
    return _svg(top + 7.5 * longest, f"Gates along “{' '.join(trace.words)}”. {'; '.join(said)}.", parts)


def _cells(shades: list[list[int]], x: Scale, top: float, height: float) -> list[str]:
    """One path for each shade; shades (words, blocks) count from 1, 0 is closed."""
    paths: list[list[str]] = [[] for _ in range(SHADES + 1)]
    width = x(1) - x(0) - 1
    for word, column in enumerate(shades):
        for block, shade in enumerate(column):
            paths[shade].append(f"M{x(word):.1f} {top + block * height:.2f}h{width:.1f}v{height:.2f}h-{width:.1f}z")
    return [f'<path class="open s{shade}" d="{"".join(path)}"/>' for shade, path in enumerate(paths) if shade and path]


def _svg(height: float, alt: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {height:.0f}" role="img" aria-label="{escape(alt)}">\n'
        + "\n".join(parts)
        + "\n</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start", cls: str = "") -> str:
    more = f' class="{cls}"' if cls else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, cls: str) -> str:
    return f'<rect class="{cls}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _line(points: Sequence[tuple[float, float]], number: int, *, marks: bool = True) -> str:
    """A line of its own colour and marks, so that colour is not the only difference."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    line = f'<polyline class="line l{number}" points="{places}"/>'
    return line + "".join(_mark(x, y, number) for x, y in points) if marks else line


def _mark(x: float, y: float, number: int) -> str:
    shapes = (
        f'<circle class="mark l{number}" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>',
        f'<rect class="mark l{number}" x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6"/>',
        f'<path class="mark l{number}" d="M{x:.1f} {y - 4:.1f}l4 7h-8z"/>',
    )
    return shapes[number % len(shapes)]


def _y_axis(y: Scale, ticks: Sequence[float], x: Scale, form: Callable[[float], str] = "{:g}".format) -> list[str]:
    lines = [f'<path class="grid" d="M{x.first:.1f} {y(tick):.1f}H{x.last:.1f}"/>' for tick in ticks]
    return lines + [_text(x.first - 6, y(tick) + 4, form(tick), "end") for tick in ticks]


def _x_axis(x: Scale, ticks: Sequence[float], at: float, form: Callable[[float], str] = "{:g}".format) -> list[str]:
    lines = [f'<path class="axis" d="M{x(tick):.1f} {at:.1f}v{TICK}"/>' for tick in ticks]
    return [
        f'<path class="axis" d="M{x.first:.1f} {at:.1f}H{x.last:.1f}"/>',
        *lines,
        *(_text(x(tick), at + 17, form(tick), "middle") for tick in ticks),
    ]


def _even_ticks(high: float) -> list[float]:
    """From 0 on, at most seven."""
    step = next(step for step in (0.25, 0.5, 1, 2, 5, 10, 20, 50, 100) if high / step <= 6)
    return [number * step for number in range(int(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between two numbers; more of them if those are too few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for leading in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8), [half / 2 for half in range(2, 20)]):
        ticks = [lead * 10.0**power for power in decades for lead in leading if low <= lead * 10.0**power <= high]
        if len(ticks) >= 3:
            break
    return ticks
