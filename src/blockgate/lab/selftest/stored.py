"""What packed weights stand for, read from their bytes by the documented layouts, and how near they must be."""

from __future__ import annotations

from typing import Any

import numpy as np

from blockgate.lab.selftest.numbers import Array

__all__ = ["decoded", "format_of", "most_error"]

# Outputs of a column that share a scale.
OF_A_COLUMN = {"int8": 128, "int4": 32}


def format_of(layer: Any) -> str:
    """The name of a packed layer's format."""
    name: str = (layer if hasattr(layer, "columns") else layer.packed).format.name
    return name


def decoded(layer: Any) -> tuple[Array, Array]:
    """What a packed layer's weights stand for, read by their documented layout: (m, n), and the step of each."""
    if hasattr(layer, "columns"):
        return _decoded_columns(layer)
    packed = layer.packed
    grid, name = packed.grid, packed.format.name
    height, depth = min(grid.block[0], grid.out_features), min(grid.block[1], grid.in_features)
    # The tensor of bfloat16 goes to float32 first: NumPy has no such type.
    stored = (packed.blocks.float() if name in {"float32", "bfloat16", "float16"} else packed.blocks).numpy()
    blocks, panels, lines, _ = stored.shape
    if name == "int4":
        pairs = np.stack([stored & 15, stored >> 4], 3).astype(np.int64)
        whole = pairs.reshape(blocks, panels, 2 * lines, 16)
        whole = np.where(whole > 7, whole - 16, whole)
    elif name in {"int8", "int8a8"}:
        whole = stored.reshape(blocks, panels, lines, 16, 2).swapaxes(3, 4).reshape(blocks, panels, 2 * lines, 16)
    else:
        whole = stored
    rows = whole.astype(np.float64).swapaxes(2, 3).reshape(blocks, panels * 16, -1)[..., :depth]
    step = np.zeros_like(rows)
    if name in {"int8", "int8a8"}:
        step = np.broadcast_to(packed.scale.double().numpy()[..., None], rows.shape)
    elif name == "int4":
        step = np.repeat(packed.scale.double().numpy().swapaxes(1, 2), 32, 2)[..., :depth]
    if name in {"int8", "int8a8", "int4"}:
        rows = rows * step
    found = []
    for part in (rows, np.abs(step)):
        tiles = part[:, :height].reshape(grid.out_blocks, grid.in_blocks, height, depth).swapaxes(1, 2)
        matrix = tiles.reshape(grid.out_blocks * height, grid.in_blocks * depth)
        found.append(matrix[: grid.out_features, : grid.in_features])
    return found[0], found[1]


def _decoded_columns(layer: Any) -> tuple[Array, Array]:
    """The same of columns (inputs, rows of blocks, outputs): two panels of int4 share their bytes."""
    grid, name = layer.grid, layer.format.name
    stored = (layer.columns.float() if name == "bfloat16" else layer.columns).numpy()
    if name == "int4":
        groups = stored.reshape(*stored.shape[:2], -1, 16).astype(np.int64)
        whole = np.stack([groups & 15, groups >> 4], 3).reshape(*stored.shape[:2], -1)
        stored = np.where(whole > 7, whole - 16, whole)
    values = stored.astype(np.float64)
    step = np.zeros_like(values)
    if name in OF_A_COLUMN:
        step = np.repeat(layer.scale.double().numpy(), OF_A_COLUMN[name], 2)
        values = values * step
    height = min(grid.block[0], grid.out_features)
    matrices = [a[:, :, :height].reshape(grid.in_features, -1)[:, : grid.out_features].T for a in (values, step)]
    return matrices[0], matrices[1]


def most_error(layer: Any, weight: Array, step: Array) -> Array:
    """How far stored weights may be from the layer's: half a step, or half of the last bit that a type has."""
    name = format_of(layer)
    if name == "int4" and not hasattr(layer, "columns"):
        # The end of its range is lopsided.
        return 1.6 * step
    size = np.abs(weight)
    known = {"float32": 0.0 * step, "bfloat16": 2.0**-8 * size, "float16": 2.0**-11 * size + 2.0**-25}
    return known.get(name, 0.5 * step)
