"""float16: eleven significant bits, and a range that ends at 65504."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockgate.errors import invalid
from blockgate.formats.base import Format, register

if TYPE_CHECKING:
    from blockgate.grid import BlockGrid

__all__ = ["Float16"]


@register
class Float16(Format):
    """Three bits more than bfloat16 in the same space, for weights that are neither large nor tiny."""

    name = "float16"
    bits = 16
    dtype = torch.float16

    def check_weight(self, weight: Tensor) -> None:
        """Refuses numbers that would become inf; NaN and inf stay what they are."""
        if weight.is_meta:
            return
        too_large = weight.half().isinf() & ~weight.isinf()
        if too_large.any():
            raise invalid(
                "weight",
                expected="numbers up to 65504 for float16",
                got=f"{weight[too_large].abs().max().item():.6g}",
                remedy="Pack to 'bfloat16', which has the range of float32.",
            )

    def error_bound(self, weight: Tensor, grid: BlockGrid) -> Tensor:  # noqa: ARG002
        """Half a unit in the last of eleven bits, or of the smallest step; infinite where rounding overflows."""
        smallest_step = 2.0**-24
        bound = weight.abs() * 2.0**-11 + smallest_step / 2
        return torch.where(weight.abs() > torch.finfo(torch.float16).max, torch.inf, bound)

    def _encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows.half(), rows.new_empty(0)

    def _decode(self, stored: Tensor, scale: Tensor, depth: int) -> Tensor:  # noqa: ARG002
        return stored.float()
