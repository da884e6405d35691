"""The gate atlas: a record as one interactive page that needs nothing but itself.

`page.html` is its frame and `style.css` its looks. The scripts share one scope: `data.js` decodes, `maps.js` draws the
matrices, `charts.js` everything else, and `main.js` connects them with the reader.
"""

from __future__ import annotations

import base64
import ctypes
import json
import math
import os
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import torch

from blockgate._version import __version__
from blockgate.checkpoint.atomic import write_whole
from blockgate.errors import BlockgateError, invalid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from blockgate.inspect.statistics import GateStatistics

__all__ = ["write_atlas"]

SCRIPTS = ("data.js", "maps.js", "charts.js", "main.js")

# A browser reads pages of this size in about a second; larger ones make it stutter.
MOST_BLOCKS = 2**21
MOST_TRACE = 2**25
# Classes beyond these many, fewest rows first, are left out: their maps would be a page of their own.
MOST_CLASSES = 40

# A block is always on above, and rarely open up to, these shares of rows (the paper's rule).
ALWAYS, RARELY = 0.95, 0.05


def write_atlas(
    gates: Mapping[str, GateStatistics],
    path: str | os.PathLike[str],
    *,
    tokens: Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
    history: Sequence[Mapping[str, Any]] | None = None,
    title: str = "Gate atlas",
) -> Path:
    """Writes the page; see `GateRecord.to_html`."""
    path = Path(path)
    if path.suffix.lower() not in {".html", ".htm"}:
        raise invalid("path", expected="a name that ends in .html", got=str(path), remedy="Choose one.")
    seen = {name: gate for name, gate in gates.items() if gate.rows}
    if not seen:
        raise invalid("atlas", expected="gates that saw rows", got="none", remedy="Run the model inside the record.")
    length = _trace_length(seen, tokens)
    _check_size(seen, length)
    labels = _labels(seen)
    names = _class_names(labels, class_names)
    data = {
        "version": __version__,
        "tokens": list(map(str, range(1, length + 1) if tokens is None else tokens)),
        "named": tokens is not None,
        "classes": names,
        "classes_left_out": len({label for gate in seen.values() for label in gate.labels}) - len(labels),
        "history": _history(history),
        "gates": [_gate(name, gate, length, labels) for name, gate in seen.items()],
    }
    page = _page(title, data)
    try:
        write_whole(path, page)
    except OSError as error:
        raise BlockgateError(f"atlas: expected to write {path}, got {error}. Choose another path.") from error
    return path


def _page(title: str, data: dict[str, Any]) -> str:
    folder = resources.files("blockgate.inspect.atlas")
    parts = {name: (folder / name).read_text(encoding="utf-8") for name in ("page.html", "style.css", *SCRIPTS)}
    # No text can end the script element early; outside of strings JSON has no "<".
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Template(parts["page.html"]).substitute(
        title=escape(title),
        style=parts["style.css"],
        data=text,
        script="\n".join(parts[name] for name in SCRIPTS),
        version=escape(__version__),
    )


def _gate(name: str, gate: GateStatistics, length: int, labels: list[int]) -> dict[str, Any]:
    """Everything about one gate; arrays as base64 of little-endian numbers, block by block."""
    grid, counts = gate.grid, gate.open_counts
    own = [label for label in labels if label in gate.class_rows]
    trace = gate.trace if length and len(gate.trace) == length else None
    overlap = gate.overlap()
    facts: dict[str, Any] = {
        "name": name,
        "features": [grid.out_features, grid.in_features],
        "block": list(grid.block),
        "grid": [grid.out_blocks, grid.in_blocks],
        "rows": gate.rows,
        "empty_rows": gate.empty_rows,
        "density": gate.measured_density,
        "target": gate.target_density,
        "shares": _shares(gate),
        "overlap": overlap.inputs,
        "frequency": _base64(_steps(counts, gate.rows, 2**16 - 1), 2),
        "value": _base64(gate.value_sum.div(counts.clamp(min=1)).float().nan_to_num(0.0, 0.0, 0.0)),
        "trace": None,
        "classes": None,
    }
    if trace is not None:
        scale = float(trace.abs().nan_to_num(0.0, 0.0, 0.0).max())
        # 0 is closed and nothing else: the smallest open gate is 1.
        steps = trace.abs().div(scale or 1.0).mul(255).nan_to_num(255.0).clamp(1, 255).ceil()
        facts["trace"] = _base64(torch.where(trace == 0, 0.0, steps).to(torch.uint8))
        facts["trace_scale"] = scale
    if own:
        opened = [_steps(gate.class_open_counts[label], gate.class_rows[label], 255) for label in own]
        facts["classes"] = {
            "numbers": [labels.index(label) for label in own],
            "rows": [gate.class_rows[label] for label in own],
            "frequency": _base64(torch.stack(opened).to(torch.uint8)),
            "overlap": [[None if math.isnan(v) else v for v in row] for row in gate.class_overlap(own).tolist()],
        }
    return facts


def _shares(gate: GateStatistics) -> list[float]:
    """Shares of blocks always on, input dependent, rarely open, and dead; they add up to 1."""
    always, depends, off = gate.shares(ALWAYS)
    dead = int((gate.open_counts == 0).sum()) / gate.grid.num_blocks
    return [always, depends, off - dead, dead]


def _steps(counts: Tensor, rows: int, steps: int) -> Tensor:
    """Shares of rows in whole steps; only never is 0, and only always the highest."""
    inside = counts.double().div(rows).mul(steps).round().clamp(1, steps - 1)
    return torch.where(counts == 0, 0.0, torch.where(counts == rows, float(steps), inside))


def _base64(numbers: Tensor, size: int | None = None) -> str:
    """The bytes of a tensor; `size` 2 stores whole numbers in two bytes each, for which torch has no conversion."""
    if size == 2:
        whole = numbers.to(torch.int32)
        numbers = torch.stack([whole & 255, whole >> 8], dim=-1).to(torch.uint8)
    numbers = numbers.contiguous()
    # Little-endian, as on every machine that torch runs on.
    return base64.b64encode(ctypes.string_at(numbers.data_ptr(), numbers.nbytes)).decode()


def _trace_length(gates: Mapping[str, GateStatistics], tokens: Sequence[str] | None) -> int:
    """How many rows the page steps through: those that were kept, one for each token."""
    kept = [len(gate.trace) for gate in gates.values()]
    if tokens is None:
        return max(kept)
    if isinstance(tokens, str) or len(tokens) not in kept:
        raise invalid(
            "tokens",
            expected=f"a list of {max(kept)}, one for each row that was kept",
            got=tokens if isinstance(tokens, str) else len(tokens),
            remedy="Record one text, with record_gates(model, trace=len(tokens)).",
        )
    return len(tokens)


def _check_size(gates: Mapping[str, GateStatistics], length: int) -> None:
    blocks = sum(gate.grid.num_blocks for gate in gates.values())
    if blocks > MOST_BLOCKS or blocks * length > MOST_TRACE:
        raise invalid(
            "atlas",
            expected=f"at most {MOST_BLOCKS:,} blocks, and {MOST_TRACE:,} blocks times tokens",
            got=f"{blocks:,} blocks, {length} tokens",
            remedy="Choose some of the gates, or keep fewer rows.",
        )


def _labels(gates: Mapping[str, GateStatistics]) -> list[int]:
    """The labels to show, in order: those with most rows."""
    rows: dict[int, int] = {}
    for gate in gates.values():
        for label, count in gate.class_rows.items():
            rows[label] = max(count, rows.get(label, 0))
    return sorted(sorted(rows, key=lambda label: (-rows[label], label))[:MOST_CLASSES])


def _class_names(labels: list[int], names: Sequence[str] | None) -> list[str]:
    if names is None:
        return [str(label) for label in labels]
    unnamed = [label for label in labels if not 0 <= label < len(names)]
    if unnamed:
        raise invalid(
            "class_names", expected="one for each label", got=f"none for {unnamed}", remedy="Labels count from 0."
        )
    return [str(names[label]) for label in labels]


def _history(rows: Sequence[Mapping[str, Any]] | None) -> list[list[float]]:
    """Epoch, and shares always on, input dependent, rarely open, dead, for each row that has them."""
    points = []
    needed = ("epoch", "always_open", "input_dependent", "dead_blocks")
    for row in rows or ():
        try:
            epoch, always, depends, dead = (float(row[name]) for name in needed)
        except (KeyError, TypeError, ValueError):
            epoch = math.nan
        if math.isnan(epoch) or not all(0 <= share <= 1 for share in (always, depends, dead)):
            raise invalid(
                "history",
                expected=f"rows with numbers {', '.join(needed)}, shares from 0 to 1",
                got=dict(row) if hasattr(row, "keys") else row,
                remedy="Give the rows of a run's epochs.csv, or your own with these names.",
            )
        points.append([epoch, always, depends, max(0.0, 1 - always - depends - dead), dead])
    return points
