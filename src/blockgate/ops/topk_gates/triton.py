"""Selection and normalisation on a GPU: one program for each row of scores, without sorting.

A program holds the scores of some groups in registers, as integers that order as the scores do. Thirty-two counts find
the k-th largest of every group bit by bit; a running count then gives ties to the lowest index and says where each kept
score is written. Groups that do not fit are taken in turns, twice: once for what the row is divided by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from blockgate.ops.gpu import LARGEST_GROUP, NotServedError
from blockgate.ops.topk_gates.reference import MARGIN_FLOOR, MARGINS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["select_backward_into", "select_into", "topk_gates", "topk_gates_backward"]

RULES = ("none", "mean", "rms", "margin", "margin_near_dense")
# The same as numbers, which kernels compare with.
_MEAN, _MARGIN = tl.constexpr(1), tl.constexpr(3)

# Scores that a program holds at once, unless a single group has more.
TILE = 4096


@triton.jit
def _ordered(scores):
    """Unsigned integers that order as the scores do, NaN above all; 0 is below every score."""
    bits = scores.to(tl.uint32, bitcast=True)
    negative = bits >= 0x80000000
    return tl.where(scores == scores, tl.where(negative, ~bits, bits | 0x80000000), 0xFFFFFFFF)


@triton.jit
def _kept(keys, k):
    """Which of each row of keys are its k largest; of equal ones, the first."""
    bit = tl.full([keys.shape[0]], 0x80000000, tl.uint32)
    threshold = tl.zeros([keys.shape[0]], tl.uint32)
    for _ in range(32):
        raised = threshold | bit
        bit = bit >> 1
        count = tl.sum((keys >= raised[:, None]).to(tl.int32), 1)
        threshold = tl.where(count >= k, raised, threshold)
    above = keys > threshold[:, None]
    equal = (keys == threshold[:, None]).to(tl.int32)
    missing = k - tl.sum(above.to(tl.int32), 1)
    return above | ((equal != 0) & (tl.cumsum(equal, 1) <= missing[:, None]))


@triton.jit
def _choose(scores, row, first, k, floor, groups, size, RULE: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Values, what is kept, mask, the columns of the runner-up and of the highest score, for GROUPS groups of a row."""
    group, column = first + tl.arange(0, GROUPS)[:, None], tl.arange(0, SIZE)[None, :]
    mask = (group < groups) & (column < size)
    value = tl.load(scores + row.to(tl.int64) * groups * size + group * size + column, mask=mask, other=0.0)
    # Of -0 too this makes 0, and of NaN nothing else.
    lowest_value = float("-inf") if RULE >= _MARGIN else 0.0
    value = tl.where((value <= lowest_value) | (value == 0), tl.maximum(lowest_value, value), value)
    value = tl.where(value == 0, 0.0, value)
    keys = tl.where(mask, _ordered(value), 0)
    kept = _kept(keys, k) & mask
    runner = tl.zeros([GROUPS], tl.int32)
    highest = tl.zeros([GROUPS], tl.int32)
    if RULE >= _MARGIN:
        highest = tl.min(tl.where(mask & (keys == tl.max(keys, 1)[:, None]), column, SIZE), 1)
        if k < size:
            rest = tl.where(kept, 0, keys)
            runner = tl.min(tl.where(mask & (kept == 0) & (rest == tl.max(rest, 1)[:, None]), column, SIZE), 1)
        else:
            # The last of the lowest: where a stable sort puts it.
            lowest = tl.min(tl.where(mask, keys, 0xFFFFFFFF), 1)
            runner = tl.max(tl.where(mask & (keys == lowest[:, None]), column, 0), 1)
        threshold = tl.sum(tl.where(column == runner[:, None], value, 0.0), 1)
        if RULE == _MARGIN and k == size:
            top = tl.sum(tl.where(column == highest[:, None], value, 0.0), 1)
            threshold = threshold - (top - threshold) / size
        value = value - (threshold - floor)[:, None]
    return value, kept, mask, runner, highest


@triton.jit
def _add_to_scale(largest, total, bad, value, kept, RULE: tl.constexpr):
    """The sums that a row is divided by, with one tile more: in units of the largest value, as the reference."""
    value = tl.where(kept, value, 0.0)
    bad = bad | (tl.max((tl.abs(value) < float("inf")).to(tl.int32) ^ 1) != 0)
    raised = tl.maximum(largest, tl.max(tl.where(tl.abs(value) < float("inf"), value, 0.0)))
    safe = tl.where(raised == 0, 1.0, raised)
    unit, before = value / safe, largest / safe
    if RULE != _MEAN:
        unit, before = unit * unit, before * before
    return raised, total * before + tl.sum(unit), bad


@triton.jit
def _scale(largest, total, bad, count, RULE: tl.constexpr):
    """What a row's values are divided by."""
    scale = 1.0
    if RULE >= _MEAN:
        average = total / count
        average = tl.where(average == 0, 1.0, average)
        if RULE != _MEAN:
            average = tl.sqrt(average)
        scale = tl.where(bad, float("nan"), tl.where(largest == 0, 1.0, largest) * average)
    return scale


@triton.jit
def _positions(row, first, kept, k, groups, GROUPS: tl.constexpr):
    """Where a row's compact gates stand, for the kept ones of a tile."""
    group = first + tl.arange(0, GROUPS)[:, None]
    return row.to(tl.int64) * groups * k + group * k + tl.cumsum(kept.to(tl.int32), 1) - 1


@triton.jit(do_not_specialize=["k", "floor"])
def _forward(
    scores,
    gates,
    indices,
    k,
    floor,
    groups,
    size,
    RULE: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    ONE_TILE: tl.constexpr,
):
    row = tl.program_id(0)
    largest, total, bad = 0.0, 0.0, False
    if RULE >= _MEAN and not ONE_TILE:
        for first in range(0, groups, GROUPS):
            value, kept, _, _, _ = _choose(scores, row, first, k, floor, groups, size, RULE, GROUPS, SIZE)
            largest, total, bad = _add_to_scale(largest, total, bad, value, kept, RULE)
    for first in range(0, groups, GROUPS):
        value, kept, _, _, _ = _choose(scores, row, first, k, floor, groups, size, RULE, GROUPS, SIZE)
        if RULE >= _MEAN and ONE_TILE:
            largest, total, bad = _add_to_scale(largest, total, bad, value, kept, RULE)
        scale = _scale(largest, total, bad, groups * size, RULE)
        place = _positions(row, first, kept, k, groups, GROUPS)
        block = (first + tl.arange(0, GROUPS)[:, None]) * size + tl.arange(0, SIZE)[None, :]
        tl.store(gates + place, value / scale, mask=kept)
        tl.store(indices + place, block.to(tl.int64), mask=kept)


@triton.jit(do_not_specialize=["k", "floor"])
def _backward(
    grad,
    scores,
    gates,
    result,
    k,
    floor,
    groups,
    size,
    RULE: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    ONE_TILE: tl.constexpr,
):
    row = tl.program_id(0)
    largest, total, bad, shared = 0.0, 0.0, False, 0.0
    if RULE >= _MEAN and not ONE_TILE:
        for first in range(0, groups, GROUPS):
            value, kept, _, _, _ = _choose(scores, row, first, k, floor, groups, size, RULE, GROUPS, SIZE)
            place = _positions(row, first, kept, k, groups, GROUPS)
            gate, slope = tl.load(gates + place, mask=kept, other=0.0), tl.load(grad + place, mask=kept, other=0.0)
            shared += tl.sum(gate * slope)
            largest, total, bad = _add_to_scale(largest, total, bad, value, kept, RULE)
    for first in range(0, groups, GROUPS):
        value, kept, mask, runner, highest = _choose(scores, row, first, k, floor, groups, size, RULE, GROUPS, SIZE)
        place = _positions(row, first, kept, k, groups, GROUPS)
        slope = tl.load(grad + place, mask=kept, other=0.0)
        if RULE >= _MEAN:
            gate = tl.load(gates + place, mask=kept, other=0.0)
            if ONE_TILE:
                shared += tl.sum(gate * slope)
                largest, total, bad = _add_to_scale(largest, total, bad, value, kept, RULE)
            # With S entries of mean (or mean square) 1, moving one score moves the common divisor by this much.
            common = shared / (groups * size)
            if RULE != _MEAN:
                common = gate * common
            slope = (slope - common) / _scale(largest, total, bad, groups * size, RULE)
        slope = tl.where(kept & (value != 0), slope, 0.0)
        if RULE >= _MARGIN:
            # Moving the runner-up moves every value of its group the other way.
            column = tl.arange(0, SIZE)[None, :]
            moved = -tl.sum(slope, 1)[:, None]
            slope += tl.where(column == runner[:, None], moved, 0.0)
            if RULE == _MARGIN and k == size:
                slope += tl.where(column == runner[:, None], moved / size, 0.0)
                slope -= tl.where(column == highest[:, None], moved / size, 0.0)
        group, column = first + tl.arange(0, GROUPS)[:, None], tl.arange(0, SIZE)[None, :]
        tl.store(result + row.to(tl.int64) * groups * size + group * size + column, slope, mask=mask)


def _options(scores: Tensor, selection: Sequence[int], normalise: str) -> tuple[tuple[object, ...], dict[str, object]]:
    """Arguments that both kernels share: numbers, then how the work is cut."""
    open_blocks, groups = selection
    size = scores.shape[1] // groups
    if scores.dtype is not torch.float32:
        raise NotServedError(f"the scores are {scores.dtype}; kernels select from float32")
    if size > LARGEST_GROUP:
        raise NotServedError(f"{size} scores to choose from at once; kernels hold up to {LARGEST_GROUP}")
    floor = MARGIN_FLOOR
    if normalise == "margin_near_dense":
        floor = max(MARGIN_FLOOR, (open_blocks / size) ** 3)
    width = max(2, triton.next_power_of_2(size))
    height = min(triton.next_power_of_2(groups), max(1, TILE // width))
    options = {
        "RULE": RULES.index(normalise),
        "GROUPS": height,
        "SIZE": width,
        "ONE_TILE": height >= groups,
        # Eight scores a thread: with sixteen, registers spill on sm_90.
        "num_warps": min(16, max(1, height * width // 256)),
    }
    return (open_blocks, floor if normalise in MARGINS else 0.0, groups, size), options


def select_into(gates: Tensor, indices: Tensor, scores: Tensor, selection: Sequence[int], normalise: str) -> None:
    """Writes what `topk_gates` returns to contiguous memory."""
    numbers, options = _options(scores, selection, normalise)
    if len(scores):
        _forward[(len(scores),)](scores.contiguous(), gates, indices, *numbers, **options)


def select_backward_into(
    result: Tensor, grad: Tensor, scores: Tensor, gates: Tensor, selection: Sequence[int], normalise: str
) -> None:
    """Writes what `topk_gates_backward` returns to contiguous memory."""
    numbers, options = _options(scores, selection, normalise)
    if len(scores):
        _backward[(len(scores),)](
            grad.contiguous(), scores.contiguous(), gates.contiguous(), result, *numbers, **options
        )


def topk_gates(scores: Tensor, selection: Sequence[int], normalise: str) -> tuple[Tensor, Tensor]:
    """As `reference.topk_gates`."""
    shape = (scores.shape[0], selection[0] * selection[1])
    gates, indices = scores.new_empty(shape), scores.new_empty(shape, dtype=torch.int64)
    select_into(gates, indices, scores, selection, normalise)
    return gates, indices


def topk_gates_backward(
    grad: Tensor,
    scores: Tensor,
    gates: Tensor,
    indices: Tensor,  # noqa: ARG001
    selection: Sequence[int],
    normalise: str,
) -> Tensor:
    """As `reference.topk_gates_backward`; what was kept is found again."""
    result = torch.empty_like(scores, memory_format=torch.contiguous_format)
    select_backward_into(result, grad, scores, gates, selection, normalise)
    return result
