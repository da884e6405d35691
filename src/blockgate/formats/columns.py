"""Weights stored column by column, for blocks of one column: an open column is one streaming read.

The formats of this package store a block as panels of 16 outputs by pairs of inputs, or share a scale among 32 inputs.
In a block of one input half of that would be padding, so these layouts share scales among outputs instead.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from blockgate.errors import invalid
from blockgate.formats.base import FORMATS, PANEL, PackedWeight
from blockgate.grid import BlockGrid

__all__ = ["IN_COLUMNS", "OUTPUTS_PER_SCALE", "pack_columns", "unpack_columns"]

# Outputs of a column that share a scale, by format; the others have no scales.
OUTPUTS_PER_SCALE = {"int8": 128, "int4": 32}
LARGEST = {"int8": 127, "int4": 7}
# What each format is in columns. They are multiplied in float, so that inputs in 8 bits would save nothing.
IN_COLUMNS = {name: name for name in ("float32", "bfloat16", "float16", "int8", "int4")} | {"int8a8": "int8"}


def pack_columns(weight: Tensor, grid: BlockGrid, name: str) -> PackedWeight:
    """A weight (m, n) as columns (n, rows of blocks, stored outputs) and scales (n, rows of blocks, groups).

    Outputs of a row of blocks are padded with zeros to whole panels, or to whole groups of outputs with one scale. int8
    and int4 are symmetric; two panels of int4 share their bytes, the first in the lower halves. floats have no
    scales, (0).
    """
    if name not in IN_COLUMNS.values() or grid.block[1] != 1:
        raise invalid(
            "pack_columns",
            expected=f"one of {tuple(dict.fromkeys(IN_COLUMNS.values()))} and blocks of one column",
            got=(name, grid.block),
            remedy="Use block_size=(out, 1).",
        )
    unit, height = OUTPUTS_PER_SCALE.get(name, PANEL), min(grid.block[0], grid.out_features)
    rows = F.pad(weight.detach().float(), (0, 0, 0, grid.out_blocks * height - grid.out_features))
    columns = F.pad(rows.t().reshape(grid.in_features, grid.out_blocks, height), (0, -height % unit))
    if name not in LARGEST:
        return PackedWeight(columns.to(FORMATS[name].dtype).contiguous(), weight.new_empty(0, dtype=torch.float32))
    groups = columns.unflatten(2, (-1, unit))
    scale = groups.abs().amax(-1) / LARGEST[name]
    integers = (groups / torch.where(scale == 0, 1, scale)[..., None]).round()
    integers = integers.clamp(-LARGEST[name], LARGEST[name]).flatten(2).to(torch.int8)
    if name == "int4":
        pairs = integers.unflatten(2, (-1, 2, PANEL)) & 15
        integers = (pairs[..., 0, :] | pairs[..., 1, :] << 4).flatten(2).view(torch.uint8)
    return PackedWeight(integers.contiguous(), scale.contiguous())


def unpack_columns(packed: PackedWeight, grid: BlockGrid, name: str) -> Tensor:
    """The float32 weight (m, n) that packed columns stand for."""
    columns = packed.blocks
    if name == "int4":
        bytes_ = columns.view(torch.int8).unflatten(2, (-1, 1, PANEL))
        columns = torch.cat([bytes_ << 4 >> 4, bytes_ >> 4], 3).flatten(2)
    values = columns.float()
    if name in LARGEST:
        values = values * packed.scale.repeat_interleave(OUTPUTS_PER_SCALE[name], 2)
    height = min(grid.block[0], grid.out_features)
    weight = values[:, :, :height].reshape(grid.in_features, -1)[:, : grid.out_features]
    return weight.t().contiguous()
