"""The recurrences a second time: LSTM, GRU and Quasi-RNN over sequences of different lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from blockgate.lab.selftest.numbers import Number, Tape

__all__ = ["gru_step", "layer", "lstm_step", "qrnn_layer", "turned"]

# The gated product of some rows.
Product = Callable[[Number], Number]
# What is carried from step to step: h and c of an LSTM, h of a GRU; (N, H) each.
State = tuple[Number, ...]
# The sums of input and state (N, gates * H), and the state, to the new one.
Step = Callable[[Tape, Number, Number, State], State]


def layer(
    tape: Tape, x: Number, alive: Sequence[int], state: State, of_input: Product, of_state: Product, step: Step
) -> tuple[Number, State]:
    """Output (R, H) and last state, from rows x (R, in): alive[t] rows at step t, falling."""
    projected = of_input(x)
    outputs: list[Number] = []
    ended: list[State] = []
    first = 0
    for rows in alive:
        before = len(state[0].value)
        if rows < before:
            ended.insert(0, tuple(tape.rows(s, rows, before) for s in state))
            state = tuple(tape.rows(s, 0, rows) for s in state)
        state = step(tape, tape.rows(projected, first, first + rows), of_state(state[0]), state)
        outputs.append(state[0])
        first += rows
    return tape.join(outputs, 0), tuple(tape.join(parts, 0) for parts in zip(state, *ended, strict=True))


def lstm_step(tape: Tape, from_input: Number, from_state: Number, state: State) -> State:
    """i, f, g, o: c = sigmoid(f) c + sigmoid(i) tanh(g), h = sigmoid(o) tanh(c)."""
    i, f, g, o = _parts(tape, tape.add(from_input, from_state), 4)
    kept = tape.mul(tape.sigmoid(f), state[1])
    c = tape.add(kept, tape.mul(tape.sigmoid(i), tape.tanh(g)))
    return tape.mul(tape.sigmoid(o), tape.tanh(c)), c


def gru_step(tape: Tape, from_input: Number, from_state: Number, state: State) -> State:
    """r, z, n: n = tanh(x_n + sigmoid(r) h_n), h = n + sigmoid(z) (h - n)."""
    (x_r, x_z, x_n), (h_r, h_z, h_n) = _parts(tape, from_input, 3), _parts(tape, from_state, 3)
    r, z = tape.sigmoid(tape.add(x_r, h_r)), tape.sigmoid(tape.add(x_z, h_z))
    n = tape.tanh(tape.add(x_n, tape.mul(r, h_n)))
    return (tape.add(n, tape.mul(z, tape.add(state[0], n, -1.0))),)


def _parts(tape: Tape, sums: Number, count: int) -> list[Number]:
    size = sums.value.shape[1] // count
    return [tape.cut(sums, part * size, (part + 1) * size) for part in range(count)]


def turned(alive: Sequence[int]) -> list[int]:
    """Where each row stands if every sequence is read from its end: rows step by step, alive[t] at step t."""
    first = np.cumsum([0, *alive])
    lengths = [sum(rows > sequence for rows in alive) for sequence in range(max(alive, default=0))]
    return [int(first[lengths[n] - 1 - t]) + n for t, rows in enumerate(alive) for n in range(rows)]


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
