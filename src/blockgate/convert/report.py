"""What `sparsify_` did to a model, layer by layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["LayerReport", "SparsifyReport"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """One layer with weight matrices: gated, or the reason why not."""

    name: str
    kind: str
    """The type that the layer had before."""
    converted: bool
    reason: str = ""
    """Why it was not converted."""
    grids: tuple[tuple[int, int], ...] = ()
    """Rows and columns of blocks of each of its matrices."""
    densities: tuple[float, ...] = ()
    """The share of the blocks of each matrix that its sparsity opens, rounding to whole blocks included."""
    gate_parameters: int = 0
    """How many parameters its gates added."""
    also: tuple[str, ...] = ()
    """Its other names, where the model uses it in several places."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SparsifyReport:
    """Every layer that `sparsify_` looked at. Print it for a table."""

    layers: tuple[LayerReport, ...]
    relative_difference: float | None = None
    """How far the output for example_input moved at sparsity 0, in eval mode: |after - before| / |before|."""
    not_run: tuple[str, ...] = ()
    """Gated layers that example_input never ran; the model may use their weights without calling them."""

    @property
    def converted(self) -> tuple[LayerReport, ...]:
        """The layers that are gated now and were not before."""
        return tuple(layer for layer in self.layers if layer.converted)

    @property
    def skipped(self) -> tuple[LayerReport, ...]:
        """The layers that are as they were, each with its reason."""
        return tuple(layer for layer in self.layers if not layer.converted)

    def to_dict(self) -> dict[str, Any]:
        """All of it in lists, dicts and numbers, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [("layer", "kind", "blocks", "open", "gate parameters", "")]
        rows += [
            (
                layer.name,
                layer.kind,
                ", ".join(f"{rows}x{columns}" for rows, columns in layer.grids) or "-",
                ", ".join(dict.fromkeys(f"{density:.1%}" for density in layer.densities)) or "-",
                f"{layer.gate_parameters:,}" if layer.converted else "-",
                "gated" if layer.converted else f"skipped: {layer.reason}",
            )
            for layer in self.layers
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = ["  ".join([*map(str.ljust, row, widths), row[5]]).rstrip() for row in rows]
        added = sum(layer.gate_parameters for layer in self.layers)
        lines.append(
            f"{len(self.converted)} layers gated, {len(self.skipped)} skipped, {added:,} gate parameters added"
        )
        if self.relative_difference is not None:
            lines.append(f"output at sparsity 0 differs by {self.relative_difference:.2%} for the example input")
        if self.not_run:
            lines.append(f"warning: the example input never ran {', '.join(self.not_run)}")
        return "\n".join(lines)
