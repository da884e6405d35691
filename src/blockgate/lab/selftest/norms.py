"""Scores of norm gates: how large an input is, times the norm of the weights that it meets."""

from __future__ import annotations

import numpy as np

from blockgate.lab.selftest.formula import Cut
from blockgate.lab.selftest.numbers import Array, Number, Tape

__all__ = ["norm_scores"]


def norm_scores(tape: Tape, x: Number, weight: Array, cut: Cut) -> Number:
    """Scores (N, blocks) for x (N, in) and weight (out, in): roots of sums of squares of |x| * a column's norm."""
    height = min(cut.block_out, cut.out)
    norms = np.stack([np.linalg.norm(weight[row * height : (row + 1) * height], axis=0) for row in range(cut.rows)])
    parts, error = np.abs(x.value)[:, None] * norms, x.bound[:, None] * norms
    starts = np.arange(cut.columns) * cut.block_in
    value = np.sqrt(np.add.reduceat(parts * parts, starts, axis=2))
    # Squares and their sums lose a few roundings, and what is below the smallest number.
    long = max(1.0, height / 16)
    bound = np.sqrt(np.add.reduceat(error * error, starts, axis=2)) + long * 4 * tape.unit * value
    bound = bound + np.sqrt(np.finfo(np.float32).tiny if tape.unit > 1e-10 else np.finfo(np.float64).tiny) * norms.max()
    shape = (len(x.value), cut.blocks)
    return tape.leaf(value.reshape(shape)) if not x.value.size else Number(value.reshape(shape), bound.reshape(shape))
