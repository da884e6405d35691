"""Bounds of the formula's numbers: wide enough for what float32 loses, and no wider."""

from __future__ import annotations

import numpy as np
import pytest

from blockgate.lab.selftest.judge import LIMIT
from blockgate.lab.selftest.numbers import REACH, Tape
from blockgate.lab.selftest.recurrences import turned

EPS = float(np.finfo(np.float32).eps)
# A product of two is far below the smallest float32.
SMALL = 1e-30


def products(tape, a, b):
    """a * b in every way that a tape has."""
    a, b = (tape.leaf(np.full((1, 1), v)) for v in (a, b))
    return [tape.mul(a, b), tape.matmul(a, b)]


def test_a_product_too_small_for_float32_may_be_0_and_no_more():
    for product in products(Tape(EPS), SMALL, SMALL):
        assert abs(product.value) <= REACH * product.bound
        assert product.bound <= 1.01 * abs(product.value)


def test_what_is_lost_is_at_most_the_smallest_number_of_each_term():
    tape = Tape(EPS)
    a, b = (tape.leaf(np.full(shape, 1.0)) for shape in ((1, 7), (7, 1)))
    least = float(np.finfo(np.float32).tiny)
    a.value[0, 1:] = 1e-37
    b.value[1:] = 1e-5
    bound = float(tape.matmul(a, b).bound[0, 0])
    assert bound <= EPS * 1.001 + 7 * least


@pytest.mark.parametrize(("a", "b"), [(0.0, 3.0), (0.0, SMALL), (0.0, 0.0)])
def test_a_product_with_0_is_exact(a, b):
    """So that a ReLU at 0 has one right gradient."""
    for product in products(Tape(EPS), a, b):
        assert product.bound == 0
        tape = Tape(EPS)
        above = tape.relu(product, 8.0)
        tape.backward([(above, np.ones((1, 1)))])
        assert product.grad == 0
        assert product.grad_bound == 0


def test_a_sigmoid_too_small_for_float32_may_be_0():
    tape = Tape(EPS)
    found = tape.sigmoid(tape.leaf(np.full((1, 1), -100.0)))
    assert found.value <= REACH * found.bound


def test_a_sigmoid_of_an_unknown_sum_is_bounded_by_its_own_range():
    """However far the sum is off, a right result stays below the limit of 4 bounds, but comes as near as 3.96."""
    tape = Tape(EPS)
    unknown = tape.leaf(np.zeros((1, 1)))
    unknown.bound = np.full((1, 1), 1e6)
    found = tape.sigmoid(unknown)
    ratio = (abs(1 - found.value) / found.bound).item()
    assert 3.9 < ratio < LIMIT


def test_rows_are_turned_sequence_by_sequence():
    """Two sequences, of three steps and of one: their rows are a0, b0, a1, a2."""
    order = turned([2, 1, 1])
    assert order == [3, 1, 2, 0]
    tape = Tape(EPS)
    rows = tape.leaf(np.arange(8.0).reshape(4, 2))
    back = tape.ordered(tape.ordered(rows, order), order)
    assert (back.value == rows.value).all()
    swapped = [2, 0, 3, 1]
    moved = tape.ordered(rows, swapped)
    tape.backward([(moved, np.arange(8.0).reshape(4, 2))])
    assert rows.grad[:, 0].tolist() == [2, 6, 0, 4]


def test_float64_loses_less():
    for product in products(Tape(float(np.finfo(np.float64).eps)), SMALL, SMALL):
        assert product.bound < 1e-15 * product.value
