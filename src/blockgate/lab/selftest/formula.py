"""The method, written down a second time: gates, products and recurrences in numbers that carry their error.

It shares no code with `ops`, `gates` or `formats`, and is written as the paper has it: the weight of each input is the
full matrix, times its gates. Only which blocks open is taken from the library, once it is known to be a right choice:
scores so close that rounding decides may go either way, and are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from blockgate.lab.selftest.numbers import Array, Number, Pair, Tape

__all__ = ["Choice", "Cut", "GateParameters", "GateRule", "WrongChoiceError", "gated_product", "gates_of", "scores_of"]

# How many bounds apart scores must lie for their order to be certain.
CERTAIN = 8.0
FLOOR = 0.001


class WrongChoiceError(Exception):
    """The library opened blocks that no rounding explains."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A weight (out, in) cut into blocks."""

    out: int
    inputs: int
    block_out: int
    block_in: int

    @property
    def rows(self) -> int:
        """Rows of blocks."""
        return (self.out + self.block_out - 1) // self.block_out

    @property
    def columns(self) -> int:
        """Columns of blocks."""
        return (self.inputs + self.block_in - 1) // self.block_in

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class GateRule:
    """How scores become gates."""

    kind: str
    normalise: str
    groups: int
    kept: int
    offset: int
    size: int
    soft: bool = False
    temperature: float = 1.0


@dataclass(slots=True)
class GateParameters:
    """Numbers of a gate's network; None where it has none."""

    weight: Number
    bias: Number
    hidden_weight: Number | None = None
    hidden_bias: Number | None = None
    key_mean: Number | None = None
    hidden_mean: Number | None = None


@dataclass(slots=True)
class Choice:
    """The library's scores, by which it chose; and how often another choice was as good."""

    scores: Array
    near_ties: int = 0


def scores_of(tape: Tape, x: Number, gate: GateParameters, rule: GateRule, parameter_eps: float) -> Number:
    """Scores (N, S) for x (N, n): one linear layer, or two, of the key less its running mean."""
    key = tape.cut(x, rule.offset, rule.offset + rule.size)
    if gate.hidden_weight is not None and gate.hidden_bias is not None:
        hidden = _layer(tape, key, gate.hidden_weight, gate.hidden_bias, gate.key_mean, parameter_eps)
        return _layer(tape, tape.relu(hidden, CERTAIN), gate.weight, gate.bias, gate.hidden_mean, parameter_eps)
    return _layer(tape, key, gate.weight, gate.bias, gate.key_mean, parameter_eps)


def _layer(tape: Tape, x: Number, weight: Number, bias: Number, mean: Number | None, parameter_eps: float) -> Number:
    """(x - mean) @ weight.T + bias."""
    if mean is not None:
        unit, tape.unit = tape.unit, parameter_eps
        shift = tape.matmul(tape.shaped(mean, (1, -1)), tape.swapped(weight, 0, 1))
        bias = tape.add(bias, tape.shaped(shift, (-1,)), -1.0)
        tape.unit = unit
    return tape.add(tape.matmul(x, tape.swapped(weight, 0, 1)), bias)


def gates_of(tape: Tape, scores: Number, rule: GateRule, cut: Cut, choice: Choice) -> Number:
    """All gates (N, blocks), 0 where closed."""
    rows, blocks = len(scores.value), cut.blocks
    if rule.kind == "sigmoid":
        return _scaled(tape, _sigmoid_over_largest(tape, scores), blocks, "mean")
    if rule.kind == "softmax_sum":
        return _softmax_sum(tape, scores, rule, blocks, choice)
    size = blocks // rule.groups
    kept, rest = _chosen(scores, rule, size, choice)
    first = (np.arange(rule.groups) * size)[None, :, None]
    index = (kept + first).reshape(rows, rule.groups * rule.kept)
    if rule.kind == "norm":
        # Open or closed, without a gradient.
        opened = np.zeros((rows, blocks))
        opened[np.arange(rows)[:, None], index] = np.take_along_axis(choice.scores, index, 1) > 0
        return tape.leaf(opened)
    if not rule.normalise.startswith("margin"):
        values = tape.take(tape.relu(scores, CERTAIN), index)
        return tape.place(_scaled(tape, values, blocks, rule.normalise), index, blocks)
    # From what the kept scores are measured: the best of the rest, or the lowest of all where all are kept.
    value, near_dense = scores.value.reshape(rows, rule.groups, size), rule.normalise == "margin_near_dense"
    seen = choice.scores.reshape(value.shape)
    candidates = rest if rest.shape[2] else kept
    among = np.take_along_axis(seen, candidates, 2)
    place = among.argmax(2) if rest.shape[2] else size - 1 - among[..., ::-1].argmin(2)
    start = np.take_along_axis(candidates, place[..., None], 2)
    _check_extreme(scores, start, candidates, 1 if rest.shape[2] else -1, size, choice)
    floor = max(FLOOR, (rule.kept / size) ** 3) if near_dense else FLOOR
    more = tape.leaf(np.full((1, 1), floor))
    more.bound = more.value * tape.unit
    low = np.repeat((start + first).reshape(rows, rule.groups), rule.kept, 1)
    from_there = tape.add(tape.take(scores, index), tape.take(scores, low), -1.0)
    if not rest.shape[2] and not near_dense:
        top = seen.argmax(2)[..., None]
        _check_extreme(scores, top, candidates, 1, size, choice)
        high = np.repeat((top + first).reshape(rows, rule.groups), rule.kept, 1)
        step = tape.add(tape.take(scores, high), tape.take(scores, low), -1.0)
        from_there = tape.add(from_there, tape.mul(step, tape.leaf(np.full((1, 1), 1 / size))))
    return tape.place(_scaled(tape, tape.add(from_there, more), blocks, "rms"), index, blocks)


def _chosen(scores: Number, rule: GateRule, size: int, choice: Choice) -> tuple[Array, Array]:
    """Indices (N, groups, kept) and (N, groups, rest) within their group, ascending; checked against the scores."""
    shape = (len(scores.value), rule.groups, size)
    seen, value, bound = (a.reshape(shape) for a in (choice.scores, scores.value, scores.bound))
    if not rule.normalise.startswith("margin"):
        seen, value = np.maximum(seen, 0), np.maximum(value, 0)
    order = np.argsort(-seen, axis=2, kind="stable")
    kept, rest = np.sort(order[..., : rule.kept], 2), np.sort(order[..., rule.kept :], 2)
    if rest.shape[2]:
        take = np.take_along_axis
        least = take(value, kept, 2).min(2)
        most = take(value, rest, 2).max(2)
        sure_least = take(value + CERTAIN * bound, kept, 2).min(2)
        sure_most = take(value - CERTAIN * bound, rest, 2).max(2)
        if (sure_least < sure_most).any():
            raise WrongChoiceError("blocks were chosen whose scores are not the largest")
        choice.near_ties += int((least < most).sum())
    return kept, rest


def _check_extreme(scores: Number, index: Array, among: Array, sign: int, size: int, choice: Choice) -> None:
    """Whether the score at `index` is the largest (or lowest) among others, as far as rounding tells."""
    value = sign * scores.value.reshape(*index.shape[:2], size)
    bound = CERTAIN * scores.bound.reshape(value.shape)
    own, others = np.take_along_axis(value, index, 2), np.take_along_axis(value, among, 2)
    own_bound, bounds = np.take_along_axis(bound, index, 2), np.take_along_axis(bound, among, 2)
    if (own + own_bound < (others - bounds).max(2, keepdims=True)).any():
        raise WrongChoiceError("the runner-up is not the largest of the scores that stay closed")
    choice.near_ties += int((own < others.max(2, keepdims=True)).sum())


def _sigmoid_over_largest(tape: Tape, scores: Number) -> Number:
    """sigmoid(scores) over the largest of each row, which no scale changes: far below 0 all of them would vanish."""
    logarithm = -np.logaddexp(0, -scores.value)
    below = logarithm - logarithm.max(1, keepdims=True, initial=-np.inf)
    value = np.exp(below)
    slope = value * (1 - np.exp(logarithm))
    lost = 4 * tape.unit * value * (1 + np.abs(logarithm))

    def back(grad: Pair) -> list[Pair]:
        return [tape.times(grad, (slope, value * scores.bound + lost))]

    return tape.make((value, slope * scores.bound + lost), (scores,), back)


def _softmax_sum(tape: Tape, scores: Number, rule: GateRule, blocks: int, choice: Choice) -> Number:
    """The sum of the heads in use, scaled to mean 1: soft, or with one block for each head."""
    heads = tape.cut(scores, 0, rule.kept * blocks)
    rows, scale = len(scores.value), blocks / rule.kept
    if not rule.soft:
        value, bound = (a.reshape(rows, rule.kept, blocks) for a in heads.pair)
        seen = choice.scores[:, : rule.kept * blocks].reshape(value.shape)
        best = seen.argmax(2)[..., None]
        own = np.take_along_axis(value + CERTAIN * bound, best, 2)
        if (own < (value - CERTAIN * bound).max(2, keepdims=True)).any():
            raise WrongChoiceError("a head chose a block that is not its best")
        choice.near_ties += int((np.take_along_axis(value, best, 2) < value.max(2, keepdims=True)).sum())
        votes = np.zeros((rows, blocks))
        np.add.at(votes, (np.arange(rows)[:, None], best[..., 0]), scale)
        return tape.leaf(votes)
    flat = tape.shaped(heads, (rows * rule.kept, blocks))
    flat = tape.mul(flat, tape.leaf(np.full((1, 1), 1 / rule.temperature)))
    soft = tape.shaped(_softmax(tape, flat), (rows, rule.kept, blocks))
    value, bound = tape.total(soft.pair, 1)
    summed = tape.make(
        (value, bound), (soft,), lambda g: [(_spread(g[0], soft.value.shape), _spread(g[1], soft.value.shape))]
    )
    return tape.mul(summed, tape.leaf(np.full((1, 1), scale)))


def _spread(values: Array, shape: tuple[int, ...]) -> Array:
    return np.broadcast_to(values[:, None], shape)


def _softmax(tape: Tape, a: Number) -> Number:
    value = np.exp(a.value - a.value.max(1, keepdims=True))
    value /= value.sum(1, keepdims=True)
    bound = value * (a.bound + (value * a.bound).sum(1, keepdims=True) + 4 * tape.unit)

    def back(grad: Pair) -> list[Pair]:
        weighed = tape.times(grad, (value, bound))
        mean = tape.total(weighed, 1, keepdims=True)
        moved = tape.times((value, bound), mean)
        return [(weighed[0] - moved[0], weighed[1] + moved[1])]

    return tape.make((value, bound), (a,), back)


def _scaled(tape: Tape, values: Number, blocks: int, rule: str) -> Number:
    """Kept values (N, E) divided so that all `blocks` gates of a row have mean 1 or rms 1; a row of zeros stays."""
    if rule == "none":
        return values
    v, bound = values.pair
    rms = rule == "rms"
    # In units of the largest, since squares may leave the range of numbers.
    largest = np.abs(v).max(1, keepdims=True)
    unit = np.where(largest > 0, largest, 1)
    power, moved = v / unit, bound / unit
    total = (power * power if rms else power).sum(1, keepdims=True)
    some = total > 0
    total = np.where(some, total, 1)
    size = unit * (np.sqrt(total / blocks) if rms else total / blocks)
    # The relative error of the divisor; where it isn't small, nothing is known.
    relative = ((np.abs(power) * moved if rms else moved).sum(1, keepdims=True)) / total
    relative = np.where(relative > 1 / 64, np.inf, relative)
    gates = np.where(some, v / size, 0)
    with np.errstate(invalid="ignore"):
        gate_bound = np.where(some, bound / size + np.abs(gates) * (relative + 4 * tape.unit), bound * 0)
    gate_bound = np.where(np.isnan(gate_bound), np.inf, gate_bound)

    def back(grad: Pair) -> list[Pair]:
        weighed = tape.total(tape.times(grad, (gates, gate_bound)), 1, keepdims=True)
        mean = weighed[0] / blocks, weighed[1] / blocks
        shift = tape.times((gates, gate_bound), mean) if rms else mean
        result = (grad[0] - shift[0]) / size
        parts = (np.abs(grad[0]) + np.abs(shift[0])) / size
        with np.errstate(invalid="ignore"):
            error = (grad[1] + shift[1]) / size + parts * (relative + 4 * tape.unit)
        return [(np.where(some, result, 0), np.where(some, np.where(np.isnan(error), np.inf, error), 0))]

    return tape.make((gates, gate_bound), (values,), back)


def gated_product(tape: Tape, x: Number, weight: Number, bias: Number | None, gates: Number, cut: Cut) -> Number:
    """y (N, out): each row's weight is the full one, times its gates (N, blocks) expanded to blocks."""
    rows = len(x.value)
    # One matrix (r, block_out, in) for each row of blocks. A block larger than the weight needs no padding.
    height = min(cut.block_out, cut.out)
    padding = ((0, cut.rows * height - cut.out), (0, 0))
    stacked: Any = tuple(np.pad(a, padding).reshape(cut.rows, height, cut.inputs) for a in weight.pair)
    starts = np.arange(cut.columns) * cut.block_in
    widths = np.diff([*starts.tolist(), cut.inputs])

    def expanded(a: Array) -> Array:
        return np.repeat(a.reshape(rows, cut.rows, cut.columns).swapaxes(0, 1), widths, axis=2)

    gate = expanded(gates.value), expanded(gates.bound)
    inputs = x.value[None], x.bound[None]
    open_inputs = tape.times(inputs, gate)
    product = tape.product(open_inputs, (stacked[0].swapaxes(1, 2), stacked[1].swapaxes(1, 2)))

    def joined(a: Array) -> Array:
        return a.swapaxes(0, 1).reshape(rows, cut.rows * height)[:, : cut.out]

    def back(grad: Pair) -> list[Pair]:
        wide = ((0, 0), (0, cut.rows * height - cut.out))
        above: Any = tuple(np.pad(a, wide).reshape(rows, cut.rows, height).swapaxes(0, 1) for a in grad)
        of_weight = tape.product((above[0].swapaxes(1, 2), above[1].swapaxes(1, 2)), open_inputs)
        of_open = tape.product(above, stacked)
        of_x = tape.total(tape.times(of_open, gate), 0)
        of_gate = tape.times(of_open, inputs)
        of_gate = of_gate[0], of_gate[1] + tape.unit * np.abs(of_gate[0])
        of_gates: Any = tuple(
            np.add.reduceat(a, starts, axis=2).swapaxes(0, 1).reshape(rows, cut.blocks) for a in of_gate
        )
        matrix: Any = tuple(a.reshape(-1, cut.inputs)[: cut.out] for a in of_weight)
        return [of_x, matrix, of_gates]

    y = tape.make((joined(product[0]), joined(product[1])), (x, weight, gates), back)
    return y if bias is None else tape.add(y, bias)
