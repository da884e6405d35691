"""What a packed format is, the registry of all formats, and the layout they share.

Packed blocks have the shape (num_blocks, panels, lines, 16 or 32): a block holds panels of 16 outputs, and a panel
holds for each input, or for each pair of them, the 16 outputs' weights side by side. One open block is thus one
streaming read. Ragged edges are padded with weights of 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blockgate.errors import invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockgate.grid import BlockGrid

__all__ = ["FORMATS", "PANEL", "Format", "PackedWeight", "get_format", "register", "rows_of", "weight_of"]

PANEL = 16


class PackedWeight(NamedTuple):
    """A weight in some format: what its file holds."""

    blocks: Tensor
    scale: Tensor


class Format(ABC):
    """How weights are stored for inference. One object per format, known by its name.

    Everything here is plain PyTorch: it defines what is stored, judges the kernels, and serves where there are none.
    """

    name: str
    bits: int  # of a stored weight; scales come on top
    dtype: torch.dtype  # of the stored blocks; formats that share one store the same
    side_by_side: int = 1  # elements of one output in a line of a panel
    kernels: tuple[str, ...] = ("cpu",)  # backends that compute with it natively

    def pack(self, weight: Tensor, grid: BlockGrid) -> PackedWeight:
        """The float32 weight (m, n) in this format."""
        stored, scale = self._encode(rows_of(weight, grid))
        panels = stored.view(grid.num_blocks, -1, PANEL, stored.shape[-1] // self.side_by_side, self.side_by_side)
        return PackedWeight(panels.transpose(2, 3).flatten(3).contiguous(), scale)

    def unpack(self, packed: PackedWeight, grid: BlockGrid) -> Tensor:
        """The float32 weight (m, n) that a packed one stands for."""
        stored = packed.blocks.unflatten(3, (PANEL, self.side_by_side)).transpose(2, 3).flatten(3).flatten(1, 2)
        return weight_of(self._decode(stored, packed.scale, min(grid.block[1], grid.in_features)), grid)

    def of_version_1(self, blocks: Tensor) -> Tensor:
        """Blocks as 0.1 stored them, with one input to a line, in the layout of today."""
        whole = F.pad(blocks, (0, 0, 0, -blocks.shape[2] % self.side_by_side))
        count, panels, inputs, outputs = whole.shape
        pairs = whole.view(count, panels, inputs // self.side_by_side, self.side_by_side, outputs)
        return pairs.transpose(3, 4).flatten(3)

    def shapes(self, grid: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of blocks and scale, from (out_features, in_features, block_out, block_in); they may be symbolic."""
        out_features, in_features, block_out, block_in = grid
        num_blocks = -(-out_features // block_out) * -(-in_features // block_in)
        panels, depth = -(-min(block_out, out_features) // PANEL), min(block_in, in_features)
        lines, line = self._elements(depth) // self.side_by_side, PANEL * self.side_by_side
        return (num_blocks, panels, lines, line), self._scale_shape(num_blocks, panels * PANEL, depth)

    def round_inputs(self, x: Tensor, grid: BlockGrid) -> Tensor:  # noqa: ARG002
        """Inputs x (N, n) as products with this format see them."""
        return x

    def check_weight(self, weight: Tensor) -> None:  # noqa: B027
        """Raises a clear error if the format can't hold `weight`."""

    @abstractmethod
    def error_bound(self, weight: Tensor, grid: BlockGrid) -> Tensor:
        """An upper bound (m, n) of |unpack(pack(weight)) - weight|, element by element."""

    @abstractmethod
    def _encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of blocks (num_blocks, padded outputs, depth) as elements (num_blocks, padded outputs, E) and scales."""

    @abstractmethod
    def _decode(self, stored: Tensor, scale: Tensor, depth: int) -> Tensor:
        """The rows of blocks that elements and scales stand for, in float32."""

    def _elements(self, depth: int) -> int:
        return depth

    def _scale_shape(self, num_blocks: int, padded: int, depth: int) -> tuple[int, ...]:  # noqa: ARG002
        return (0,)

    def __repr__(self) -> str:
        return f"<format {self.name}>"

    def __reduce__(self) -> Any:
        # Copies and pickles of a model name its format.
        return get_format, (self.name,)


FORMATS: dict[str, Format] = {}


def register(format_type: type[Format]) -> type[Format]:
    """Makes a format known by its name; decorates the class."""
    made = format_type()
    FORMATS[made.name] = made
    return format_type


def get_format(wanted: str | torch.dtype | Format) -> Format:
    """The format of this name, or of a torch dtype's name; a format is returned as it is."""
    if isinstance(wanted, Format):
        return wanted
    name = str(wanted).removeprefix("torch.") if isinstance(wanted, torch.dtype) else wanted
    if isinstance(name, str) and name in FORMATS:
        return FORMATS[name]
    raise invalid(
        "format",
        expected=f"one of {', '.join(map(repr, FORMATS))}, or a torch dtype of that name",
        got=wanted,
        remedy="'float32' keeps every bit; see blockgate.formats for what the others cost.",
    )


def rows_of(weight: Tensor, grid: BlockGrid) -> Tensor:
    """A weight (m, n) as rows of blocks (num_blocks, padded outputs, depth), with zeros at ragged edges."""
    rows, columns = min(grid.block[0], grid.out_features), min(grid.block[1], grid.in_features)
    missing = (grid.in_blocks * columns - grid.in_features, grid.out_blocks * rows - grid.out_features)
    padded = F.pad(weight, (0, missing[0], 0, missing[1]))
    blocks = padded.view(grid.out_blocks, rows, grid.in_blocks, columns).transpose(1, 2).flatten(0, 1)
    return F.pad(blocks, (0, 0, 0, -rows % PANEL))


def weight_of(rows: Tensor, grid: BlockGrid) -> Tensor:
    """The weight (m, n) whose rows of blocks these are."""
    height, columns = min(grid.block[0], grid.out_features), min(grid.block[1], grid.in_features)
    weight = rows[:, :height].view(grid.out_blocks, grid.in_blocks, height, columns).transpose(1, 2)
    weight = weight.reshape(grid.out_blocks * height, grid.in_blocks * columns)
    return weight[: grid.out_features, : grid.in_features].contiguous()
