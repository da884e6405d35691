"""Holds what the library computes against the formula, tensor by tensor, in units of the formula's error bound."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from blockgate.lab.selftest.numbers import Array, Number, Pair

if TYPE_CHECKING:
    from torch import Tensor

    from blockgate.lab.selftest.problems import Problem

__all__ = ["LIMIT", "DifferenceError", "Findings"]

# The most that a result may differ, in bounds: eps times the sum of its absolute terms.
LIMIT = 4.0


class DifferenceError(AssertionError):
    """The library and the formula disagree."""


@dataclass(slots=True)
class Findings:
    """What was compared, and how it went."""

    problems: int = 0
    comparisons: int = 0
    elements: int = 0
    undetermined: int = 0
    near_ties: int = 0
    equalities: int = 0
    mistrusted: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    worst_of: dict[str, str] = field(default_factory=dict)
    by_layer: dict[str, int] = field(default_factory=dict)

    def compare(self, problem: Problem, name: str, actual: Tensor, expected: Pair, precision: str = "") -> None:
        """One comparison: a tensor of the library with value and bound from the formula.

        `precision` is the type whose worst error this belongs to; that of the tensor if empty.
        """
        eps, least, largest, kind = _limits(actual.dtype)
        # Of bfloat16 NumPy knows nothing.
        found = actual.detach().double().numpy().ravel()
        value, bound = expected[0].reshape(-1), expected[1].reshape(-1)
        size = np.abs(value)
        allowed = bound + (eps * size + least)
        ratio = np.abs(found - value) / allowed
        total = size + allowed
        worst = float(ratio.max()) if ratio.size else 0.0
        # What leaves the range of the type, or hangs on a number that is all error, has no right answer.
        if not (total.size and float(total.max()) < largest):
            known = total < largest
            count = int(known.sum())
            self.undetermined += ratio.size - count
            if ratio.size and not count:
                return
            ratio = np.where(known, ratio, 0)
            worst = float(ratio.max()) if ratio.size else 0.0
        self.comparisons += 1
        self.elements += ratio.size
        self.by_layer[problem.layer] = self.by_layer.get(problem.layer, 0) + 1
        precision = precision or kind
        if not worst <= self.worst.get(precision, -1.0):
            self.worst[precision], self.worst_of[precision] = worst, f"{name} of {problem}"
        if not worst <= LIMIT:
            at = int(np.where(np.isnan(ratio), np.inf, ratio).argmax())
            place = [int(i) for i in np.unravel_index(at, tuple(actual.shape))]
            raise DifferenceError(
                f"{name}{place}: expected {value[at]:.9g} within {LIMIT:g} x {allowed[at]:.3g}, got "
                f"{found[at]:.9g}, which is {worst:.3g} times that"
            )

    def equal(self, problem: Problem, name: str, actual: Tensor, expected: Tensor) -> None:
        """Whether two tensors of the library have the same bits, NaN included."""
        self.equalities += 1
        if actual.shape != expected.shape or not torch.equal(_bits(actual), _bits(expected)):
            raise DifferenceError(f"{name}: expected the same bits in both calls, got others ({problem.layer})")

    def trust(self, y: Array) -> None:
        """Notes a problem whose output is mostly zeros: it may be right by accident."""
        if y.size and np.count_nonzero(y) * 2 < y.size:
            self.mistrusted += 1

    def add(self, other: Findings) -> None:
        """Takes over what another has found."""
        for name in ("problems", "comparisons", "elements", "undetermined", "near_ties", "equalities", "mistrusted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for layer, count in other.by_layer.items():
            self.by_layer[layer] = self.by_layer.get(layer, 0) + count
        for kind, worst in other.worst.items():
            if worst > self.worst.get(kind, -1.0):
                self.worst[kind], self.worst_of[kind] = worst, other.worst_of[kind]


@cache
def _limits(dtype: torch.dtype) -> tuple[float, float, float, str]:
    """Of a type: eps, what is lost where numbers become too small for it, the largest number, and the name."""
    limits = torch.finfo(dtype)
    least = limits.smallest_normal * (limits.eps if dtype is torch.float16 else 2.0**20)
    return limits.eps, least, limits.max, str(dtype).removeprefix("torch.")


def _bits(t: Tensor) -> Tensor:
    return torch.nan_to_num(t.detach(), nan=12345.0)


def gradient_of(number: Number) -> Pair:
    """Its gradient and the bound of it; zeros where nothing depends on it."""
    if number.grad is None:
        zeros: Any = np.zeros_like(number.value)
        return zeros, zeros
    return number.grad, number.grad_bound
