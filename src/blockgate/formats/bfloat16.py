"""bfloat16: the upper half of a float32, rounded to nearest, ties to even."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockgate.formats.base import Format, register

if TYPE_CHECKING:
    from blockgate.grid import BlockGrid

__all__ = ["BFloat16"]


@register
class BFloat16(Format):
    """Eight significant bits and the whole range of float32."""

    name = "bfloat16"
    bits = 16
    dtype = torch.bfloat16

    def error_bound(self, weight: Tensor, grid: BlockGrid) -> Tensor:  # noqa: ARG002
        """Half a unit in the last of eight bits; infinite where rounding overflows."""
        smallest_step = 2.0**-133
        bound = weight.abs() * 2.0**-8 + smallest_step
        return torch.where(weight.abs() > torch.finfo(torch.bfloat16).max, torch.inf, bound)

    def _encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows.bfloat16(), rows.new_empty(0)

    def _decode(self, stored: Tensor, scale: Tensor, depth: int) -> Tensor:  # noqa: ARG002
        return stored.float()
