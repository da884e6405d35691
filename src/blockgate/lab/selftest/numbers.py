"""Numbers in float64 that carry a bound of the rounding errors that lower precision makes on the way to them.

A small automatic differentiation in NumPy, of its own so that it shares no code with what it judges. Each number has
a value and a bound: the sum of the absolute terms that were added up to it, times the eps of the precision that is
judged, with the bounds of its inputs carried along to first order. Gradients carry bounds in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Array", "Number", "Pair", "Tape"]

Array = Any
# As far as results are allowed to differ, in bounds.
REACH = 4.0
# From so many terms on, the bound of a sum grows with their number.
LEANING = 32
# A value and the bound of its error, arrays of the same shape.
Pair = tuple[Array, Array]


class Number:
    """A value on a tape, with its bound, and after `Tape.backward` its gradient with a bound too."""

    __slots__ = ("back", "bound", "grad", "grad_bound", "inputs", "value")

    def __init__(self, value: Array, bound: Array, inputs: Sequence[Number] = (), back: Any = None) -> None:
        self.value, self.bound, self.inputs, self.back = value, bound, inputs, back
        self.grad: Array = None
        self.grad_bound: Array = None

    @property
    def pair(self) -> Pair:
        """Value and bound."""
        return self.value, self.bound


class Tape:
    """Makes numbers, remembers how, and walks back for their gradients.

    Args:
        eps: of the precision whose errors are bounded; `unit` may be changed between operations.
    """

    def __init__(self, eps: float) -> None:
        self.unit = eps
        # What is below this may be lost: products that vanish have no error in units of eps.
        self.least = float(np.finfo(np.float32 if eps > np.finfo(np.float64).eps else np.float64).tiny)
        self._made: list[Number] = []
        self._units: list[float] = []

    def leaf(self, value: Array) -> Number:
        """An exact number."""
        value = np.asarray(value, dtype=np.float64)
        return Number(value, np.zeros_like(value))

    def make(self, pair: Pair, inputs: Sequence[Number], back: Callable[[Pair], Sequence[Pair | None]]) -> Number:
        """A number made from others; `back` turns its gradient into theirs."""
        made = Number(*pair, inputs, back)
        self._made.append(made)
        self._units.append(self.unit)
        return made

    def backward(self, outputs: Sequence[tuple[Number, Array]]) -> None:
        """Gradients of every number, from those of the outputs."""
        for number, grad in outputs:
            _accumulate(number, (grad, np.zeros_like(grad)))
        for number, unit in zip(reversed(self._made), reversed(self._units), strict=True):
            if number.grad is None:
                continue
            self.unit = unit
            for source, grad in zip(number.inputs, number.back((number.grad, number.grad_bound)), strict=True):
                if grad is not None:
                    _accumulate(source, grad)

    # Pairs.

    def times(self, a: Pair, b: Pair) -> Pair:
        """a * b, broadcast."""
        value = a[0] * b[0]
        bound = np.abs(a[0]) * b[1] + a[1] * (np.abs(b[0]) + REACH * b[1]) + self.unit * np.abs(value)
        return value, self._or_lost(bound, 1)

    def _or_lost(self, bound: Array, terms: int) -> Array:
        """A bound of sums of so many products, of which those that are too small for the precision become 0.

        What is lost is at most all of a product, and at most the smallest normal number of each. All products together
        are at most the bound over eps, since eps times each of them is part of it: where all are 0, nothing is lost.
        """
        return bound + np.minimum(bound / self.unit, terms * self.least)

    def product(self, a: Pair, b: Pair) -> Pair:
        """a @ b: the bound is that of the sum of all absolute terms.

        The roundings of a long running sum may lean to one side, up to a quarter eps for each term.
        """
        size_a, size_b = np.abs(a[0]), np.abs(b[0])
        unit = self.unit * max(1.0, b[0].shape[-2] / LEANING)
        bound = size_a @ (b[1] + unit * size_b) + a[1] @ (size_b + REACH * b[1])
        return a[0] @ b[0], self._or_lost(bound, b[0].shape[-2])

    def total(self, a: Pair, axis: Any, keepdims: bool = False) -> Pair:
        """Sum over axes."""
        value = a[0].sum(axis, keepdims=keepdims)
        unit = self.unit * max(1.0, a[0].size / max(value.size, 1) / LEANING)
        return value, (a[1] + unit * np.abs(a[0])).sum(axis, keepdims=keepdims)

    # Numbers.

    def add(self, a: Number, b: Number, sign: float = 1.0) -> Number:
        """a + sign * b, broadcast."""
        value = a.value + sign * b.value
        bound = a.bound + b.bound + self.unit * np.abs(value)
        shapes = a.value.shape, b.value.shape

        def back(grad: Pair) -> list[Pair]:
            return [self._unbroadcast(grad, shapes[0]), self._unbroadcast((sign * grad[0], grad[1]), shapes[1])]

        return self.make((value, bound), (a, b), back)

    def mul(self, a: Number, b: Number) -> Number:
        """a * b, broadcast."""

        def back(grad: Pair) -> list[Pair]:
            return [
                self._unbroadcast(self.times(grad, b.pair), a.value.shape),
                self._unbroadcast(self.times(grad, a.pair), b.value.shape),
            ]

        return self.make(self.times(a.pair, b.pair), (a, b), back)

    def matmul(self, a: Number, b: Number) -> Number:
        """a @ b of the same number of dimensions."""

        def back(grad: Pair) -> list[Pair]:
            return [self.product(grad, _turned(b.pair)), self.product(_turned(a.pair), grad)]

        return self.make(self.product(a.pair, b.pair), (a, b), back)

    def apply(self, a: Number, function: Callable[[Array], Array], slope: Callable[[Array], Array]) -> Number:
        """A function of every element, given its slope by its value; itself exact to two eps.

        Where it bends within reach of the error of `a`, the slope at one point says nothing: so its values on both
        sides tell how far it may move. Second derivatives are below 1.
        """
        value = function(a.value)
        reach = REACH * a.bound
        moved = np.maximum(np.abs(function(a.value + reach) - value), np.abs(value - function(a.value - reach)))
        # What is unknown stays so, though it can't leave the range of the function.
        moved = np.where(np.isfinite(a.bound), 1.01 * moved / REACH, np.inf)
        bound = self._or_lost(moved + 2 * self.unit * np.abs(value), 1)
        steep = slope(value)

        def back(grad: Pair) -> list[Pair]:
            steep_bound = a.bound + 2 * self.unit * np.maximum(np.abs(steep), np.abs(value) * np.abs(steep) + 0.25)
            return [self.times(grad, (steep, steep_bound))]

        return self.make((value, bound), (a,), back)

    def curve(self, a: Number, function: Callable[[Array], tuple[Array, Array]]) -> Number:
        """A function whose value and slope at x are given; x times a share of 1 that is exact to a few eps.

        As in `apply`, its values on both sides tell how far it may move; between them it may bend away by half a second
        derivative times the reach squared, or a slope times the reach. Both derivatives are below 1.2.
        """
        value, steep = function(a.value)
        reach = REACH * a.bound
        above, below = function(a.value + reach)[0], function(a.value - reach)[0]
        moved = np.maximum(np.abs(above - value), np.abs(value - below))
        moved = np.where(np.isfinite(a.bound), np.maximum(1.01 * moved / REACH, np.abs(steep) * a.bound), np.inf)
        bound = self._or_lost(moved + a.bound * np.minimum(1.2, reach) + 2 * self.unit * np.abs(a.value), 1)

        def back(grad: Pair) -> list[Pair]:
            return [self.times(grad, (steep, 1.2 * a.bound + 4 * self.unit * (1 + np.abs(steep))))]

        return self.make((value, bound), (a,), back)

    def sigmoid(self, a: Number) -> Number:
        """1 / (1 + exp(-a))."""
        return self.apply(a, _sigmoid, lambda value: value * (1 - value))

    def tanh(self, a: Number) -> Number:
        """tanh(a)."""
        return self.apply(a, np.tanh, lambda value: 1 - value * value)

    def relu(self, a: Number, margin: float) -> Number:
        """max(a, 0). So near to 0 that its sign is uncertain (`margin` bounds), either gradient is right."""
        positive = a.value > 0
        unsure = (np.abs(a.value) <= margin * a.bound) & (a.bound > 0)

        def back(grad: Pair) -> list[Pair]:
            return [(grad[0] * positive, grad[1] * (positive | unsure) + np.abs(grad[0]) * unsure)]

        return self.make((a.value * positive, a.bound * (positive | unsure)), (a,), back)

    def take(self, a: Number, index: Array) -> Number:
        """a (N, S) at the columns index (N, K)."""

        def back(grad: Pair) -> list[Pair]:
            rows = np.arange(len(index))[:, None]
            spread: list[Array] = []
            for part in grad:
                full = np.zeros_like(a.value)
                np.add.at(full, (rows, index), part)
                spread.append(full)
            return [(spread[0], spread[1])]

        pick = np.arange(len(index))[:, None], index
        return self.make((a.value[pick], a.bound[pick]), (a,), back)

    def place(self, a: Number, index: Array, width: int) -> Number:
        """Zeros (N, width) with a (N, K) added at the columns index (N, K)."""
        rows = np.arange(len(index))[:, None]
        parts: list[Array] = []
        for part in a.pair:
            full = np.zeros((len(index), width))
            np.add.at(full, (rows, index), part)
            parts.append(full)

        def back(grad: Pair) -> list[Pair]:
            return [(grad[0][rows, index], grad[1][rows, index])]

        return self.make((parts[0], parts[1]), (a,), back)

    def cut(self, a: Number, begin: int, end: int) -> Number:
        """Columns begin .. end of the last dimension."""

        def back(grad: Pair) -> list[Pair]:
            full = np.zeros_like(a.value), np.zeros_like(a.value)
            full[0][..., begin:end], full[1][..., begin:end] = grad
            return [full]

        return self.make((a.value[..., begin:end], a.bound[..., begin:end]), (a,), back)

    def join(self, parts: Sequence[Number], axis: int) -> Number:
        """Concatenated along an axis."""
        ends = np.cumsum([p.value.shape[axis] for p in parts])[:-1]

        def back(grad: Pair) -> list[Pair]:
            return list(zip(np.split(grad[0], ends, axis), np.split(grad[1], ends, axis), strict=True))

        pair = np.concatenate([p.value for p in parts], axis), np.concatenate([p.bound for p in parts], axis)
        return self.make(pair, parts, back)

    def shaped(self, a: Number, shape: tuple[int, ...]) -> Number:
        """The same numbers in another shape."""

        def back(grad: Pair) -> list[Pair]:
            return [(grad[0].reshape(a.value.shape), grad[1].reshape(a.value.shape))]

        return self.make((a.value.reshape(shape), a.bound.reshape(shape)), (a,), back)

    def swapped(self, a: Number, first: int, second: int) -> Number:
        """With two dimensions exchanged."""

        def back(grad: Pair) -> list[Pair]:
            return [(grad[0].swapaxes(first, second), grad[1].swapaxes(first, second))]

        return self.make((a.value.swapaxes(first, second), a.bound.swapaxes(first, second)), (a,), back)

    def cast(self, a: Number, eps: float, smallest: float, *, forward: bool = False) -> Number:
        """Converted between precisions: the gradient is rounded to the narrower one, and `forward` the value too."""
        value, bound = a.pair
        if forward:
            bound = bound + eps * np.abs(value) + smallest

        def back(grad: Pair) -> list[Pair]:
            return [(grad[0], grad[1] + eps * np.abs(grad[0]) + smallest)]

        return self.make((value, bound), (a,), back)

    def ordered(self, a: Number, index: Sequence[int]) -> Number:
        """Rows in another order."""
        back_again = np.argsort(index)

        def back(grad: Pair) -> list[Pair]:
            return [(grad[0][back_again], grad[1][back_again])]

        return self.make((a.value[index], a.bound[index]), (a,), back)

    def rows(self, a: Number, begin: int, end: int) -> Number:
        """Rows begin .. end of the first dimension."""

        def back(grad: Pair) -> list[Pair]:
            full = np.zeros_like(a.value), np.zeros_like(a.value)
            full[0][begin:end], full[1][begin:end] = grad
            return [full]

        return self.make((a.value[begin:end], a.bound[begin:end]), (a,), back)

    def _unbroadcast(self, grad: Pair, shape: tuple[int, ...]) -> Pair:
        if grad[0].shape == shape:
            return grad
        axes = tuple(range(grad[0].ndim - len(shape)))
        summed = self.total(grad, axes) if axes else grad
        kept = tuple(i for i, size in enumerate(shape) if size == 1 and summed[0].shape[i] != 1)
        return self.total(summed, kept, keepdims=True) if kept else summed


def _sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def _turned(pair: Pair) -> Pair:
    return pair[0].swapaxes(-1, -2), pair[1].swapaxes(-1, -2)


def _accumulate(number: Number, grad: Pair) -> None:
    if number.grad is None:
        number.grad, number.grad_bound = grad
    else:
        number.grad, number.grad_bound = number.grad + grad[0], number.grad_bound + grad[1]
