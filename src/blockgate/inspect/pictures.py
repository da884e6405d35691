"""Pictures of a record: what is always on, which blocks a class opens, how gates move along a sentence."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from blockgate.checkpoint.atomic import replace_whole
from blockgate.errors import BlockgateError, invalid
from blockgate.inspect.statistics import select_gates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from blockgate.inspect.record import GateRecord
    from blockgate.inspect.sensitivity import Sensitivity
    from blockgate.inspect.statistics import GateStatistics

__all__ = ["draw_classes", "draw_distribution", "draw_sensitivity", "draw_trace"]

FORMATS = (".png", ".svg")
DOTS_PER_INCH = 150
# Higher pictures can't be drawn: 2^16 dots.
MOST_INCHES = 400

# Colours that colour-blind readers can tell apart (Okabe and Ito), and that differ in lightness when printed grey.
SHARE_COLOURS = {"always on": "#0072B2", "input dependent": "#E69F00", "always off": "#D9D9D9"}
# White is closed, everywhere; one hue that darkens needs no colour vision.
OPEN_COLOURS = "Blues"

CLASSES_PER_LINE = 12
FONT_SIZE = 8
# For names that come from users: a $ is a dollar sign.
TEXT: dict[str, Any] = {"fontsize": FONT_SIZE, "parse_math": False}
# Inches.
BAR_HEIGHT = 0.32
LEGEND_HEIGHT = 0.4
PANEL_WIDTH = 0.8
PANEL_GAP = 0.1
TITLE_GAP = 0.25
SCALE_HEIGHT = 0.5
MOST_PANEL_HEIGHT = 2.4
TOKEN_WIDTH = 0.2
BLOCK_HEIGHT = 0.06
LEAST_TRACE_HEIGHT, MOST_TRACE_HEIGHT = 0.8, 3.0

# Where every gate is closed, all are drawn as 0.
SMALLEST_VALUE = 1e-12


def draw_distribution(record: GateRecord, path: str | os.PathLike[str], *, threshold: float = 0.95) -> Path:
    """Draws one bar for each gate: its shares of blocks always on, input dependent, always off (Fig. 2 of the paper).

    Args:
        record: what was recorded.
        path: a .png or .svg file.
        threshold: see `GateRecord.distribution`.
    """
    shares = record.distribution(threshold)
    if not shares:
        raise _nothing("gates that saw rows", "Run the model inside the record.")
    height = BAR_HEIGHT * len(shares)
    figure = _figure(6.0, height + LEGEND_HEIGHT)
    axes = _axes_at(figure, 0, LEGEND_HEIGHT, 6.0, height)
    left = [0.0] * len(shares)
    for number, (label, colour) in enumerate(SHARE_COLOURS.items()):
        widths = [100 * share[number] for share in shares.values()]
        bars = axes.barh(range(len(shares)), widths, left=left, height=0.8, color=colour, label=label)
        texts = [f"{w:.0f}" if w >= 5 else "" for w in widths]
        axes.bar_label(bars, texts, label_type="center", color="white" if number == 0 else "black", fontsize=FONT_SIZE)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(shares)), [f"{name}, {_open(record.gates[name])}" for name in shares])
    axes.set(xlim=(0, 100), ylim=(len(shares) - 0.4, -0.6))
    axes.set_xlabel(f"% of blocks (always: for at least {threshold:.0%} of inputs)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize=FONT_SIZE + 1)
    return _write(figure, path)


def draw_classes(
    record: GateRecord,
    path: str | os.PathLike[str],
    *,
    gates: Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
) -> Path:
    """Draws, for each gate and class, how often every block of its grid opens (Fig. 1 of the paper).

    Args:
        record: what was recorded under `record.labelled`.
        path: a .png or .svg file.
        gates: names of the gates to draw; all of them if None.
        class_names: what to call the classes, by label; the labels themselves if None.
    """
    chosen = {name: gate for name, gate in select_gates(record.gates, gates).items() if gate.labels}
    if not chosen:
        raise _nothing("rows with labels", "Run the model inside `with record.labelled(y):`.")
    unnamed = {label for gate in chosen.values() for label in gate.labels} - set(range(len(class_names or ())))
    if class_names is not None and unnamed:
        raise invalid(
            "class_names",
            expected="one for each label",
            got=f"none for {sorted(unnamed)}",
            remedy="Labels count from 0.",
        )
    lines = [(name, labels) for name, gate in chosen.items() for labels in _lines_of(gate.labels)]
    columns = max(len(labels) for _, labels in lines)
    heights = [_panel_height(chosen[name]) for name, _ in lines]
    # Labels stand above a line of panels, unless they are those of the line before.
    titled = [number == 0 or lines[number - 1][1] != labels for number, (_, labels) in enumerate(lines)]
    tops = _stack(SCALE_HEIGHT, heights, [TITLE_GAP if title else PANEL_GAP for title in titled])
    figure = _figure(columns * (PANEL_WIDTH + PANEL_GAP), tops[-1] + heights[-1])
    for (name, labels), top, height, title in zip(lines, tops, heights, titled, strict=True):
        for column, label in enumerate(labels):
            axes = _axes_at(figure, column * (PANEL_WIDTH + PANEL_GAP), top, PANEL_WIDTH, height)
            frequency = chosen[name].frequency(label).numpy()
            image = axes.imshow(frequency, vmin=0, vmax=1, cmap=OPEN_COLOURS, aspect="auto", interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            if title:
                axes.set_title(str(label) if class_names is None else class_names[label], pad=3, **TEXT)
            if column == 0:
                _name_at_left(axes, f"{name}\n{_open(chosen[name])}")
    _add_scale(figure, image, "share of inputs that open the block (white: none)")
    return _write(figure, path)


def draw_trace(
    record: GateRecord,
    path: str | os.PathLike[str],
    *,
    tokens: Sequence[str] | None = None,
    gates: Sequence[str] | None = None,
) -> Path:
    """Draws the gates of the last rows, tokens from left to right and blocks from top to bottom.

    Only blocks that one of these rows opens are drawn, the most used at the top. Closed gates are white.

    Args:
        record: what was recorded with `record_gates(model, trace=...)`.
        path: a .png or .svg file.
        tokens: the words, one for each row that was kept; numbers if None.
        gates: names of the gates to draw; all of them if None.
    """
    chosen = {name: gate for name, gate in select_gates(record.gates, gates).items() if len(gate.trace)}
    if not chosen:
        raise _nothing("rows that were kept", "Record with record_gates(model, trace=...).")
    rows = max(len(gate.trace) for gate in chosen.values())
    if tokens is not None and any(len(gate.trace) != len(tokens) for gate in chosen.values()):
        raise invalid(
            "tokens",
            expected=f"{rows}, one for each row that was kept",
            got=len(tokens),
            remedy="Record one sentence, with trace=len(tokens).",
        )
    used = {name: (gate.trace != 0).sum(0) for name, gate in chosen.items()}
    heights = [_trace_height(int(counts.count_nonzero())) for counts in used.values()]
    width = max(3.5, min(20.0, TOKEN_WIDTH * rows))
    tops = _stack(SCALE_HEIGHT, heights, [PANEL_GAP] * len(heights))
    figure = _figure(width, tops[-1] + heights[-1])
    colours = _colours_of_open_gates()
    for (name, gate), top, height in zip(chosen.items(), tops, heights, strict=True):
        opened = int(used[name].count_nonzero())
        order = used[name].argsort(descending=True, stable=True)[: max(1, opened)]
        values = gate.trace[:, order].T / gate.trace.max().clamp(min=SMALLEST_VALUE)
        values[values == 0] = torch.nan
        axes = _axes_at(figure, 0, top, width, height)
        image = axes.imshow(values.numpy(), vmin=0, vmax=1, cmap=colours, aspect="auto", interpolation="nearest")
        axes.set(xticks=[], yticks=[])
        _name_at_left(axes, f"{name}\n{opened} of {gate.grid.num_blocks} blocks")
    if tokens is not None:
        axes.set_xticks(range(rows), tokens, rotation=90, **TEXT)
    else:
        axes.set_xticks([0, rows - 1], ["1", str(rows)], fontsize=FONT_SIZE)
        axes.set_xlabel("row", fontsize=FONT_SIZE, labelpad=-4)
    _add_scale(figure, image, "gate, as a share of the layer's largest (white: closed)")
    return _write(figure, path)


def draw_sensitivity(found: Sensitivity, path: str | os.PathLike[str]) -> Path:
    """Draws what every layer loses at every level: the rise of the loss if it was measured, else the output's error.

    Args:
        found: what `bg.sensitivity` returned.
        path: a .png or .svg file.
    """
    lost = [layer.errors if layer.losses is None else layer.losses for layer in found.layers]
    top, height = SCALE_HEIGHT + TITLE_GAP, BAR_HEIGHT * len(lost)
    width = max(2.5, PANEL_WIDTH * len(found.levels))
    figure = _figure(width, top + height)
    axes = _axes_at(figure, 0, top, width, height)
    values = [[loss[level] for level in found.levels] for loss in lost]
    largest = max(SMALLEST_VALUE, *(value for row in values for value in row))
    image = axes.imshow(values, vmin=0, vmax=largest, cmap=OPEN_COLOURS, aspect="auto", interpolation="nearest")
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            colour = "white" if value > 0.6 * largest else "black"
            axes.text(column, row, f"{value:.2g}", ha="center", va="center", color=colour, fontsize=FONT_SIZE)
    axes.set_yticks(range(len(lost)), [layer.name for layer in found.layers], **TEXT)
    axes.set_xticks(range(len(found.levels)), [f"{level:.0%}" for level in found.levels], fontsize=FONT_SIZE)
    axes.xaxis.tick_top()
    _add_scale(figure, image, "relative error of the output" if found.loss is None else "rise of the loss")
    return _write(figure, path)


def _colours_of_open_gates() -> Colormap:
    """Without its lightest part, so that a gate that is open a little can be told from a closed one."""
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap

    shades = [colormaps[OPEN_COLOURS](0.2 + 0.8 * step / 255) for step in range(256)]
    return LinearSegmentedColormap.from_list("open gates", shades)


def _lines_of(labels: list[int]) -> list[list[int]]:
    """Labels in lines of about equal length."""
    length = -(-len(labels) // -(-len(labels) // CLASSES_PER_LINE))
    return [labels[first : first + length] for first in range(0, len(labels), length)]


def _stack(first: float, heights: list[float], gaps: list[float]) -> list[float]:
    """Where panels of these heights begin, in inches from the top, each with its gap above."""
    tops = []
    for height, gap in zip(heights, gaps, strict=True):
        tops.append(first + gap)
        first += gap + height
    return tops


def _axes_at(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes at this place, in inches from the upper left corner. Automatic layout is slow for hundreds."""
    full_width, full_height = figure.get_size_inches()
    bottom = full_height - top - height
    return figure.add_axes((left / full_width, bottom / full_height, width / full_width, height / full_height))


def _open(gate: GateStatistics) -> str:
    """The share of blocks that opened, in words."""
    return f"{gate.measured_density or 0:.1%} open"


def _name_at_left(axes: Axes, name: str) -> None:
    axes.set_ylabel(name, rotation=0, ha="right", va="center", **TEXT)


def _add_scale(figure: Figure, image: AxesImage, label: str) -> None:
    """A colour bar above all panels, of the same size whatever that of the picture."""
    width = min(2.5, figure.get_figwidth())
    axes = _axes_at(figure, (figure.get_figwidth() - width) / 2, SCALE_HEIGHT - 0.1, width, 0.1)
    bar = figure.colorbar(image, cax=axes, orientation="horizontal", ticklocation="top")
    bar.set_label(label, fontsize=FONT_SIZE)
    axes.tick_params(labelsize=FONT_SIZE)


def _panel_height(gate: GateStatistics) -> float:
    """Inches, so that blocks of a panel look square unless the grid is very long or very flat."""
    height = PANEL_WIDTH * gate.grid.out_blocks / gate.grid.in_blocks
    return min(MOST_PANEL_HEIGHT, max(PANEL_WIDTH / 4, height))


def _trace_height(blocks: int) -> float:
    """Inches for a panel with so many blocks from top to bottom."""
    return min(MOST_TRACE_HEIGHT, max(LEAST_TRACE_HEIGHT, BLOCK_HEIGHT * blocks))


def _nothing(expected: str, remedy: str) -> BlockgateError:
    return invalid("picture", expected=expected, got="none", remedy=remedy)


def _figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches. It belongs to nobody else, so there is nothing to close."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BlockgateError("picture: expected matplotlib, got none. Run: pip install 'blockgate[train]'")
    if height > MOST_INCHES:
        raise invalid(
            "picture",
            expected=f"at most {MOST_INCHES} inches of panels",
            got=round(height),
            remedy="Choose some gates.",
        )
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DOTS_PER_INCH)


def _write(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Writes the figure whole, or not at all."""
    import matplotlib as mpl

    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise invalid("path", expected=f"a name that ends in {FORMATS}", got=str(path), remedy="Choose one of them.")
    kind = path.suffix[1:].lower()
    try:
        # The same record gives the same file: no date, no random names inside.
        with mpl.rc_context({"svg.hashsalt": "blockgate"}), replace_whole(path) as part:
            figure.savefig(part, format=kind, bbox_inches="tight", metadata={"Date": None} if kind == "svg" else None)
    except OSError as error:
        raise BlockgateError(f"picture: expected to write {path}, got {error}. Choose another path.") from error
    return path
