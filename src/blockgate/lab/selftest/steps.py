"""Inputs of products with integer weights."""

from __future__ import annotations

import numpy as np

from blockgate.lab.selftest.formula import Cut
from blockgate.lab.selftest.numbers import Number, Tape

__all__ = ["stepped"]


def stepped(tape: Tape, x: Number, cut: Cut, kind: str) -> Number:
    """Inputs as products with integer weights see them: whole steps, the largest of a block 32767 of them."""
    if kind == "int8a8":
        return _in_bytes(tape, x, cut)
    if kind not in {"int8", "int4"}:
        return x
    value, bound = x.value.copy(), x.bound.copy()
    exact = not bound.any()
    for begin in range(0, cut.inputs, cut.block_in):
        part = slice(begin, min(begin + cut.block_in, cut.inputs))
        width = part.stop - begin
        summed = width if kind == "int8" else min(width, 32)
        most = min(2**15 - 1, (2**31 - 1) // ((127 if kind == "int8" else 8) * summed))
        size = np.float32(np.abs(value[:, part]).max(1, keepdims=True, initial=0).astype(np.float32) / np.float32(most))
        size = np.maximum(size, np.finfo(np.float32).tiny).astype(np.float64)
        if not exact:
            bound[:, part] += 0.51 * size
            continue
        steps = value[:, part] / size
        # Near a half either neighbour is right.
        near = np.abs(np.abs(steps - np.floor(steps)) - 0.5) < 0.01
        rounded = np.rint(steps) * size
        bound[:, part] = np.where(near, size, 0)
        value[:, part] = rounded
    return tape.make((value, bound), (x,), lambda grad: [grad])


def _in_bytes(tape: Tape, x: Number, cut: Cut) -> Number:
    """255 steps of one size for a whole row, from its lowest input (or 0) to its highest (or 0); 0 is one of them."""
    most = np.float32(min(255, (2**31 - 1) // (127 * min(cut.block_in, cut.inputs))))
    low = np.minimum(x.value.min(1, keepdims=True, initial=0), 0).astype(np.float32)
    high = np.maximum(x.value.max(1, keepdims=True, initial=0), 0).astype(np.float32)
    size = np.maximum(high / most - low / most, np.finfo(np.float32).tiny).astype(np.float64)
    if x.bound.any():
        return tape.make((x.value.copy(), x.bound + 0.52 * size), (x,), lambda grad: [grad])
    below = -low.astype(np.float64) / size
    down = np.minimum(np.rint(below), most)
    steps = x.value / size
    rounded = np.clip(np.rint(steps), -down, most - down)
    near = np.abs(np.abs(steps - np.floor(steps)) - 0.5) < 0.01
    # Where 0 lies between two steps, either may be its place, and the ends move with it.
    near |= (np.abs(np.abs(below - np.floor(below)) - 0.5) < 0.01) & ((steps > most - down - 1) | (steps < 1 - down))
    return tape.make((rounded * size, np.where(near, size, 0)), (x,), lambda grad: [grad])
