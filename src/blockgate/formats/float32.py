"""float32: every bit is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockgate.formats.base import Format, register

if TYPE_CHECKING:
    from blockgate.grid import BlockGrid

__all__ = ["Float32"]


@register
class Float32(Format):
    """Weights as they are; only their order changes."""

    name = "float32"
    bits = 32
    dtype = torch.float32

    def error_bound(self, weight: Tensor, grid: BlockGrid) -> Tensor:  # noqa: ARG002
        """Zeros."""
        return torch.zeros_like(weight)

    def _encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows, rows.new_empty(0)

    def _decode(self, stored: Tensor, scale: Tensor, depth: int) -> Tensor:  # noqa: ARG002
        return stored
