"""`summary`: the parameters, multiply-adds and densities of a model, layer by layer."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from blockgate.errors import invalid
from blockgate.inspect.counting import LayerSummary, count_layers
from blockgate.inspect.table import markdown_table, short, text_table, to_percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["ModelSummary", "summary"]

COLUMNS = ["layer", "kind", "parameters", "in gate", "blocks", "MACs dense", "MACs now", "saved", "target", "measured"]
NOTE_WIDTH = 100
TOTALS = (
    "parameters",
    "gate_parameters",
    "blocks",
    "macs_dense",
    "macs_now",
    "bytes_dense",
    "bytes_now",
    "example_macs_dense",
    "example_macs_now",
    "macs_saved",
)


def summary(
    model: nn.Module, example_input: Tensor | tuple[Any, ...] | Mapping[str, Any] | None = None
) -> ModelSummary:
    """Parameters, multiply-adds and densities of `model`, layer by layer.

    Args:
        model: any module, with or without gated layers.
        example_input: what to call the model with, to measure densities: a tensor, a tuple of arguments, or a dict of
            keyword arguments. The model runs once, in eval mode and without gradients, and is left as it was. None:
            no measured densities.
    """
    if not isinstance(model, nn.Module):
        raise invalid("summary", expected="an nn.Module", got=type(model).__name__, remedy="Pass a model or a layer.")
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise invalid("summary", expected="parameters that exist", got="lazy layers", remedy="Run a batch first.")
    return ModelSummary(*count_layers(model, example_input))


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """A table of layers and their totals. Prints as text; `to_dict` and `to_markdown` for other readers.

    Attributes:
        layers: one for each gated matrix and plain layer, and one for all other parameters.
        uncounted: types of the modules that hold those others; their multiply-adds are not counted.
    """

    layers: list[LayerSummary]
    uncounted: list[str]

    @property
    def parameters(self) -> int:
        """All parameters, gates included, each counted once."""
        return sum(x.parameters + x.gate_parameters for x in self.layers)

    @property
    def gate_parameters(self) -> int:
        """The parameters of the gates."""
        return sum(x.gate_parameters for x in self.layers)

    @property
    def blocks(self) -> int:
        """The blocks of all gated matrices."""
        return sum(x.blocks for x in self.layers)

    @property
    def macs_dense(self) -> int:
        """Multiply-adds of one row through every layer, dense."""
        return sum(x.macs_dense for x in self.layers)

    @property
    def macs_now(self) -> float:
        """Multiply-adds of one row through every layer, open blocks and gates only."""
        return sum(x.macs_now for x in self.layers)

    @property
    def bytes_dense(self) -> int:
        """Weights that one row reads in every layer, dense and in float32."""
        return sum(x.bytes_dense for x in self.layers)

    @property
    def bytes_now(self) -> float:
        """Weights that one row reads in every layer, open blocks and gates only, as they are stored."""
        return sum(x.bytes_now for x in self.layers)

    @property
    def example_macs_dense(self) -> int | None:
        """Multiply-adds of the whole example input, dense; None without one."""
        return sum(x.macs_dense * x.rows for x in self.layers if x.rows is not None) if self._has_example else None

    @property
    def example_macs_now(self) -> float | None:
        """Multiply-adds of the whole example input, open blocks and gates only; None without one."""
        return sum(x.macs_now * x.rows for x in self.layers if x.rows is not None) if self._has_example else None

    @property
    def macs_saved(self) -> float:
        """The share of multiply-adds saved, of the example input or else of one row. Time saved is less."""
        dense, now = self.example_macs_dense, self.example_macs_now
        if not dense or now is None:
            dense, now = self.macs_dense, self.macs_now
        return _saved(dense, now) or 0.0

    def to_dict(self) -> dict[str, Any]:
        """Layers and totals, ready for JSON."""
        totals = {name: getattr(self, name) for name in TOTALS}
        return {"layers": [asdict(x) for x in self.layers], "uncounted": list(self.uncounted), **totals}

    def to_markdown(self) -> str:
        """The table and its notes in Markdown."""
        return markdown_table(COLUMNS, self._rows()) + "\n" + "".join(f"- {note}\n" for note in self._notes())

    def __str__(self) -> str:
        notes = (textwrap.fill(note, NOTE_WIDTH) for note in self._notes())
        return "\n".join([text_table(COLUMNS, self._rows()), *notes])

    @property
    def _has_example(self) -> bool:
        return any(x.rows is not None for x in self.layers)

    def _rows(self) -> list[list[str]]:
        total = LayerSummary(
            name="total",
            kind="",
            parameters=self.parameters - self.gate_parameters,
            gate_parameters=self.gate_parameters,
            blocks=self.blocks,
            macs_dense=self.macs_dense,
            macs_now=self.macs_now,
        )
        return [_cells(x) for x in (*self.layers, total)]

    def _notes(self) -> Iterator[str]:
        yield f"{self.parameters:,} parameters, {self.gate_parameters:,} of them in gates."
        yield (
            "MACs: multiply-adds for one row (token) of a layer's input, gate included; biases, activations and "
            "selection are not counted. Now: at measured density, or at the target where nothing was measured."
        )
        if self.example_macs_dense is not None and self.example_macs_now is not None:
            yield f"The example input: {short(self.example_macs_dense)} MACs dense, {short(self.example_macs_now)} now."
        yield f"One row reads {short(self.bytes_now)}B of weights; dense and in float32 {short(self.bytes_dense)}B."
        yield (
            f"MACs saved: {to_percent(self.macs_saved)}. An upper bound of the time saved, which is less, and may be "
            "none in small layers: blockgate.advise measures it."
        )
        if self.uncounted:
            yield f"MACs not counted, parameters under 'other': {', '.join(self.uncounted)}."


def _cells(layer: LayerSummary) -> list[str]:
    numbers = (layer.parameters, layer.gate_parameters, layer.blocks, layer.macs_dense, layer.macs_now)
    shares = (_saved(layer.macs_dense, layer.macs_now), layer.target_density, layer.measured_density)
    return [layer.name, layer.kind, *(short(n) if n else "-" for n in numbers), *map(to_percent, shares)]


def _saved(dense: float, now: float) -> float | None:
    return 1 - now / dense if dense else None
