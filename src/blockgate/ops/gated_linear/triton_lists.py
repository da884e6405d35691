"""The rows that open each block, listed on the device: a histogram, a scan and a scatter, without float atomics.

Rows are taken in words of 32. For every block and word, a bit for each row says whether it opens the block; counting
bits gives the length of every list and the place of every row in it. The lists of one block lie one after the other, so
that any run of words is a run of the list. No shape and no launch depends on the data.

A row that has a block twice is listed once, with the sum of both gates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from blockgate.ops.gated_linear.triton_cut import WORD
from blockgate.ops.gpu import NotServedError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Lists", "by_entry", "list_rows"]

_AT_ONCE = 256


class Lists(NamedTuple):
    """Which rows open each block: `slots` of block b and words u to v are starts[b * words + u] to the like of v."""

    starts: Tensor  # (num_blocks * words + 1) int32
    rows: Tensor  # (N * E) int32, the row of each slot
    gates: Tensor  # (N * E) float32, its gate
    slot_of: Tensor  # (N, E) int32, the slot of each entry; -1 where closed
    wrong: Tensor  # (N) int32, 1 for rows with NaN or inf, or with an index outside of the grid


@triton.jit
def _count_bits(word):
    """How many bits of each int32 are set."""
    word = word.to(tl.uint32, bitcast=True)
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit(do_not_specialize=["entries"])
def mark(
    x,
    gates,
    indices,
    bits,
    counts,
    wrong,
    entries,
    in_features,
    stride_n,
    stride_k,
    num_blocks,
    words,
    SIZE: tl.constexpr,
):
    """Program n: sets the bits of row n, counts its entries, and says whether something is wrong with it."""
    n = tl.program_id(0).to(tl.int64)
    bad = 0
    for first in range(0, in_features, SIZE):
        k = first + tl.arange(0, SIZE)
        value = tl.load(x + n * stride_n + k.to(tl.int64) * stride_k, mask=k < in_features, other=0.0).to(tl.float32)
        bad = tl.maximum(bad, tl.max((tl.abs(value) < float("inf")).to(tl.int32) ^ 1))
    bit = tl.full([SIZE], 1, tl.int32) << (n % 32).to(tl.int32)
    for first in range(0, entries, SIZE):
        e = first + tl.arange(0, SIZE)
        block = tl.load(indices + n * entries + e, mask=e < entries, other=0)
        gate = tl.load(gates + n * entries + e, mask=e < entries, other=0.0)
        inside = (block >= 0) & (block < num_blocks)
        bad = tl.maximum(bad, tl.max(((gate != 0) & (inside == 0)).to(tl.int32)))
        listed = (gate != 0) & inside
        place = block * words + n // 32
        # Integers: their sum does not depend on the order.
        tl.atomic_or(bits + place, bit, mask=listed, sem="relaxed")
        tl.atomic_add(counts + place, 1, mask=listed, sem="relaxed")
    tl.store(wrong + n, bad)


@triton.jit
def sizes(bits, lengths, count, SIZE: tl.constexpr):
    """How many rows each word lists."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    tl.store(lengths + at, _count_bits(tl.load(bits + at, mask=at < count, other=0)), mask=at < count)


@triton.jit(do_not_specialize=["entries"])
def place(
    gates, indices, bits, counts, starts, rows, listed_gates, slot_of, entries, num_blocks, words, SIZE: tl.constexpr
):
    """Program n: writes the slots of row n."""
    n = tl.program_id(0).to(tl.int64)
    below = (tl.full([SIZE], 1, tl.int32) << (n % 32).to(tl.int32)) - 1
    for first in range(0, entries, SIZE):
        e = first + tl.arange(0, SIZE)
        block = tl.load(indices + n * entries + e, mask=e < entries, other=0)
        gate = tl.load(gates + n * entries + e, mask=e < entries, other=0.0)
        listed = (gate != 0) & (block >= 0) & (block < num_blocks)
        at = block * words + n // 32
        word = tl.load(bits + at, mask=listed, other=0)
        slot = tl.load(starts + at, mask=listed, other=0) + _count_bits(word & below)
        crowded = listed & (tl.load(counts + at, mask=listed, other=0) != _count_bits(word))
        leads, total = listed, gate
        if tl.max(crowded.to(tl.int32)) != 0:
            # Some row of the word has a block twice. The first entry leads, with the sum of all.
            total = tl.zeros([SIZE], tl.float32)
            for other in range(entries):
                same = listed & (tl.load(indices + n * entries + other) == block)
                value = tl.zeros([SIZE], tl.float32) + tl.load(gates + n * entries + other)
                total += tl.where(same, value, 0.0)
                leads = leads & ((same & (e > other) & (value != 0)) == 0)
        tl.store(rows + slot, n.to(tl.int32) + tl.zeros([SIZE], tl.int32), mask=leads)
        tl.store(listed_gates + slot, total, mask=leads)
        tl.store(slot_of + n * entries + e, tl.where(listed, slot, -1), mask=e < entries)


@triton.jit
def _take(by_slot, slot_of, result, count, slots, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """What the parts of every entry's slot add up to, in their order; 0 for entries without one."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    slot = tl.load(slot_of + at, mask=at < count, other=-1).to(tl.int64)
    total = tl.zeros([SIZE], tl.float32)
    for part in range(PARTS):
        total += tl.load(by_slot + part * slots.to(tl.int64) + slot, mask=slot >= 0, other=0.0)
    tl.store(result + at, total, mask=at < count)


def by_entry(by_slot: Tensor, lists: Lists) -> Tensor:
    """(N, E) from by_slot (parts, slots): the sum of the parts of every entry's slot, 0 for closed entries."""
    result = torch.empty_like(lists.slot_of, dtype=torch.float32)
    parts, slots = by_slot.shape
    _take[(triton.cdiv(result.numel(), 1024),)](
        by_slot, lists.slot_of, result, result.numel(), slots, PARTS=parts, SIZE=1024
    )
    return result


def list_rows(x: Tensor, gates: Tensor, indices: Tensor, num_blocks: int) -> Lists:
    """The lists of all blocks, for x (N, n), contiguous gates and indices (N, E)."""
    count, entries = gates.shape
    words = -(-count // WORD)
    if num_blocks * words >= 1 << 31:
        raise NotServedError(f"{num_blocks} blocks for {count} rows; kernels list up to 2^31 blocks times 32 rows")
    bits, counts = torch.zeros(2, num_blocks * words, dtype=torch.int32, device=x.device)
    lengths = torch.empty_like(bits)
    wrong = torch.empty(count, dtype=torch.int32, device=x.device)
    rows = torch.empty(count * entries, dtype=torch.int32, device=x.device)
    listed_gates = torch.empty(count * entries, dtype=torch.float32, device=x.device)
    slot_of = torch.empty(count, entries, dtype=torch.int32, device=x.device)
    mark[(count,)](
        x, gates, indices, bits, counts, wrong, entries, x.shape[1], *x.stride(), num_blocks, words, SIZE=_AT_ONCE
    )
    sizes[(triton.cdiv(len(bits), 1024),)](bits, lengths, len(bits), SIZE=1024)
    starts = torch.zeros(len(bits) + 1, dtype=torch.int32, device=x.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=starts[1:])
    place[(count,)](
        gates,
        indices,
        bits,
        counts,
        starts,
        rows,
        listed_gates,
        slot_of,
        entries,
        num_blocks,
        words,
        SIZE=_AT_ONCE,
    )
    return Lists(starts, rows, listed_gates, slot_of, wrong)
