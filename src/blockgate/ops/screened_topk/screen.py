"""What a screened output layer stores for its scan: a few bits of every weight, and how far they may be off.

A row w of the weight is q + e: what the codes of the row hold, and what they miss. Its score w x differs from that of
the scan by e x, which is at most |e| |x| (Cauchy-Schwarz), and by what rounding x costs, at most |q| |x - x'|.

Codes of 4 bits with a step for every 32 inputs were chosen by counting: `benchmarks/screened_survivors.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["GROUP", "Screen", "held_rows", "make_screen"]

PANEL = 16
# Inputs that share a step.
GROUP = 32
# Codes stand for the whole steps -8 to 7; the step of a group is a whole multiple, up to 255, of its row's unit.
LOWEST, HIGHEST, MOST_UNITS = -8, 7, 255
# Shares of the step that would hold a group's largest weight: a smaller step costs that weight something and may serve
# all others.
SHARES = (1.0, 0.92, 0.84, 0.76)
# Norms are rounded up.
UP = 1 + 2.0**-20
# Rows that are packed at a time.
AT_ONCE = 512


class Screen(NamedTuple):
    """Tensors of a scan, for a weight (V, n) in P panels of 16 rows and G groups of 32 inputs.

    Attributes:
        codes: uint8 (P, G, 256), two codes a byte: inputs 8j + i low and 8j + 4 + i high, in the order j, row, i.
        steps: uint8 (P, G, 16), the step of a group in units of its row.
        rows: (P, 4, 16): the unit of a row, the norms of what its codes miss and of what they hold, its bias.
    """

    codes: Tensor
    steps: Tensor
    rows: Tensor


def make_screen(weight: Tensor, bias: Tensor | None) -> Screen:
    """The screen of a weight (V, n) and bias (V) or None, both float32 and finite, -inf in the bias apart."""
    count, depth = weight.shape
    parts = [_pack_rows(rows) for rows in weight.split(AT_ONCE)]
    codes, steps, unit, missed, held = (torch.cat(part) for part in zip(*parts, strict=True))
    added = torch.zeros_like(unit) if bias is None else bias
    padding = -count % PANEL
    # Of rows that pad a panel nothing is known.
    rows = torch.stack([F.pad(unit, (0, padding)), F.pad(missed, (0, padding), value=torch.inf),
                        F.pad(held, (0, padding)), F.pad(added, (0, padding))])  # fmt: skip
    groups = -(-depth // GROUP)
    pairs = F.pad(codes, (0, 0, 0, 0, 0, padding)).view(-1, PANEL, groups, GROUP // 8, 2, 4)
    packed = pairs[..., 0, :] | pairs[..., 1, :] << 4
    return Screen(
        codes=packed.permute(0, 2, 3, 1, 4).reshape(-1, groups, GROUP * PANEL // 2).contiguous(),
        steps=F.pad(steps, (0, 0, 0, padding)).view(-1, PANEL, groups).transpose(1, 2).contiguous(),
        rows=rows.view(4, -1, PANEL).transpose(0, 1).contiguous(),
    )


def _pack_rows(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Codes (R, G, 32), steps (R, G), unit, norms of what is missed and held (R) of rows (R, n)."""
    groups = F.pad(weight.double(), (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    peak = groups.abs().amax(dim=-1, keepdim=True)
    step = torch.zeros_like(peak)
    least = torch.full_like(peak, torch.inf)
    for share in SHARES:
        tried = share * peak / (-LOWEST - 0.5)
        missed = (groups - _rounded(groups, tried) * tried).square().sum(dim=-1, keepdim=True)
        step = torch.where(missed < least, tried, step)
        least = torch.minimum(missed, least)
    unit = (step.amax(dim=1, keepdim=True) / MOST_UNITS).float().double()
    units = torch.where(unit > 0, (step / unit).round().clamp(0, MOST_UNITS), torch.zeros_like(step))
    step = units * unit
    codes = _rounded(groups, step)
    held = codes * step
    norms = [(part.flatten(1).norm(dim=1) * UP).float() for part in (groups - held, held)]
    return (codes - LOWEST).to(torch.uint8), units.squeeze(-1).to(torch.uint8), unit.flatten().float(), *norms


def _rounded(groups: Tensor, step: Tensor) -> Tensor:
    """Groups in whole steps; 0 where there is no step."""
    steps = torch.where(step > 0, groups / step, torch.zeros_like(groups))
    return steps.round().clamp(LOWEST, HIGHEST)


def held_rows(screen: Screen, weight: Tensor) -> Tensor:
    """What the codes of a screen hold of the weight (V, n) that it was made of, in float64."""
    panels, groups, _ = screen.codes.shape
    packed = screen.codes.view(panels, groups, GROUP // 8, PANEL, 4)
    codes = torch.stack([packed & 15, packed >> 4], dim=-2).permute(0, 3, 1, 2, 4, 5).reshape(-1, groups, GROUP)
    steps = screen.steps.transpose(1, 2).reshape(-1, groups, 1).double()
    held = (codes.double() + LOWEST) * steps * screen.rows[:, 0].reshape(-1, 1, 1).double()
    return held.flatten(1)[: weight.shape[0], : weight.shape[1]]
