"""The recurrences a second time: LSTM and Quasi-RNN over sequences of different lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from blockgate.lab.selftest.numbers import Number, Tape

__all__ = ["lstm_layer", "qrnn_layer"]

# The gated product of some rows.
Product = Callable[[Number], Number]


def lstm_layer(
    tape: Tape, x: Number, alive: Sequence[int], h: Number, c: Number, of_input: Product, of_state: Product
) -> tuple[Number, Number, Number]:
    """Output (R, H), last h and c (N, H), from rows x (R, in): alive[t] rows at step t, falling, and h, c (N, H)."""
    size = h.value.shape[1]
    projected = of_input(x)
    outputs: list[Number] = []
    ended: list[tuple[Number, Number]] = []
    first = 0
    for rows in alive:
        if rows < len(h.value):
            ended.insert(0, (tape.rows(h, rows, len(h.value)), tape.rows(c, rows, len(c.value))))
            h, c = tape.rows(h, 0, rows), tape.rows(c, 0, rows)
        sums = tape.add(tape.rows(projected, first, first + rows), of_state(h))
        i, f, g, o = (tape.cut(sums, part * size, (part + 1) * size) for part in range(4))
        kept = tape.mul(tape.sigmoid(f), c)
        c = tape.add(kept, tape.mul(tape.sigmoid(i), tape.tanh(g)))
        h = tape.mul(tape.sigmoid(o), tape.tanh(c))
        outputs.append(h)
        first += rows
    last_h = tape.join([h, *(pair[0] for pair in ended)], 0)
    return tape.join(outputs, 0), last_h, tape.join([c, *(pair[1] for pair in ended)], 0)


def qrnn_layer(
    tape: Tape, x: Number, steps: int, state: Number, of_window: Product, *, window: int, pooling: str
) -> tuple[Number, Number]:
    """Output (T * N, out) and last state (N, out), from rows x (T * N, in) that begin a sequence."""
    rows = len(state.value)
    if window == 2:
        before = tape.leaf(np.zeros((rows, x.value.shape[1])))
        if steps > 1:
            before = tape.join([before, tape.rows(x, 0, rows * (steps - 1))], 0)
        x = tape.join([x, before], 1)
    size = state.value.shape[1]
    parts = of_window(x)
    candidate, forget = tape.tanh(tape.cut(parts, 0, size)), tape.sigmoid(tape.cut(parts, size, 2 * size))
    one, states = tape.leaf(np.ones((1, 1))), []
    for t in range(steps):
        f, z = (tape.rows(a, t * rows, (t + 1) * rows) for a in (forget, candidate))
        state = tape.add(tape.mul(f, state), tape.mul(tape.add(one, f, -1.0), z))
        states.append(state)
    output = tape.join(states, 0)
    if pooling == "fo":
        output = tape.mul(tape.sigmoid(tape.cut(parts, 2 * size, 3 * size)), output)
    return output, state
