"""The gated product of a few rows: every program walks the open blocks of one row and some outputs, as decoding needs.

Weights are read in place or from packed blocks; `FORMAT` says how. Nothing is grouped. Where too few programs would
run, several share the open blocks of an output, and a second kernel adds their sums in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockgate.ops import gpu

__all__ = ["FORMATS", "add_parts", "rows_forward", "weight_at"]

# How a weight is stored: rows of a matrix, or one of `blockgate.formats`.
FORMATS = ("matrix", *gpu.FORMATS)
_MATRIX, _INT8, _INT4 = (tl.constexpr(FORMATS.index(name)) for name in ("matrix", "int8", "int4"))


@triton.jit
def weight_at(
    weight, scale, block, row, column, o, k, mask, stride_o, stride_k, block_out, block_in, lines, FORMAT: tl.constexpr
):
    """The weights of `block`, which is (row, column) of the grid, for outputs `o` and inputs `k` in it; float32.

    Packed, a block is panels of 16 outputs, a panel lines of one or two inputs, see `blockgate.formats.base`.
    """
    if FORMAT == _MATRIX:
        place = (row * block_out + o).to(tl.int64) * stride_o + (column * block_in + k).to(tl.int64) * stride_k
        return tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
    panels = (block_out + 15) // 16
    panel = (block.to(tl.int64) * panels + o // 16) * lines
    if FORMAT == _INT8:
        stored = tl.load(weight + (panel + k // 2) * 32 + o % 16 * 2 + k % 2, mask=mask, other=0)
        steps = tl.load(scale + block.to(tl.int64) * panels * 16 + o, mask=mask, other=0.0)
        return stored.to(tl.float32) * steps
    if FORMAT == _INT4:
        stored = tl.load(weight + (panel + k // 2) * 16 + o % 16, mask=mask, other=0).to(tl.int32)
        nibble = (stored >> (k % 2 * 4)) & 15
        groups = (block_in + 31) // 32
        steps = tl.load(scale + ((block.to(tl.int64) * groups + k // 32) * panels * 16 + o), mask=mask, other=0.0)
        return tl.where(nibble > 7, nibble - 16, nibble).to(tl.float32) * steps
    return tl.load(weight + (panel + k) * 16 + o % 16, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["entries", "splits"])
def rows_forward(
    x,
    weight,
    scale,
    bias,
    gates,
    indices,
    y,
    entries,
    splits,
    out_features,
    in_features,
    block_out,
    block_in,
    in_blocks,
    num_blocks,
    lines,
    stride_xn,
    stride_xk,
    stride_o,
    stride_k,
    FORMAT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    AT_ONCE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Program (n, i, part): OUTPUTS outputs of row of blocks i for row n, AT_ONCE open blocks at a time.

    With `splits` above 1, that many programs in turn share the open blocks of each part, and y is float32, (splits, N,
    m): the sum of each, for `add_parts`.
    """
    n, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split = tl.program_id(2) % splits
    # Where the entries of this row of blocks lie: for ascending indices exactly; a cover of them for others.
    low, high, wrong = entries, 0, 0
    for first in range(0, entries, SCAN):
        e = first + tl.arange(0, SCAN)
        there = e < entries
        block = tl.load(indices + n * entries + e, mask=there, other=0)
        gate = tl.load(gates + n * entries + e, mask=there, other=0.0)
        wrong = tl.maximum(wrong, tl.max(((gate != 0) & ((block < 0) | (block >= num_blocks))).to(tl.int32)))
        mine = there & (block >= i * in_blocks) & (block < (i + 1) * in_blocks)
        low = tl.minimum(low, tl.min(tl.where(mine, e, entries)))
        high = tl.maximum(high, tl.max(tl.where(mine, e + 1, 0)))
    # The share of this program: as many entries as the others have, in whole steps.
    share = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), splits), AT_ONCE) * AT_ONCE
    low += split * share
    high = tl.minimum(high, low + share)
    # NaN or inf anywhere in the row spoils all of its outputs; so does an index outside of the grid.
    for first in range(0, in_features, SCAN):
        k = first + tl.arange(0, SCAN)
        value = tl.load(x + n * stride_xn + k.to(tl.int64) * stride_xk, mask=k < in_features, other=0.0).to(tl.float32)
        wrong = tl.maximum(wrong, tl.max((tl.abs(value) < float("inf")).to(tl.int32) ^ 1))
    o = tl.program_id(2) // splits * OUTPUTS + tl.arange(0, OUTPUTS)
    out = i * block_out + o
    in_output = (o < block_out) & (out < out_features)
    lane = tl.arange(0, AT_ONCE * BLOCK_IN)
    k = lane % BLOCK_IN
    total = tl.zeros([OUTPUTS, AT_ONCE * BLOCK_IN], tl.float32)
    for first in range(low, high, AT_ONCE):
        e = first + lane // BLOCK_IN
        block = tl.load(indices + n * entries + e, mask=e < high, other=-1).to(tl.int32)
        gate = tl.load(gates + n * entries + e, mask=e < high, other=0.0).to(tl.float32)
        column = block - i * in_blocks
        feature = (column * block_in + k).to(tl.int64)
        open_ = (gate != 0) & (column >= 0) & (column < in_blocks) & (k < block_in) & (feature < in_features)
        value = gate * tl.load(x + n * stride_xn + feature * stride_xk, mask=open_, other=0.0).to(tl.float32)
        mask = in_output[:, None] & open_[None, :]
        w = weight_at(
            weight,
            scale,
            block[None, :],
            i,
            column[None, :],
            o[:, None],
            k[None, :],
            mask,
            stride_o,
            stride_k,
            block_out,
            block_in,
            lines,
            FORMAT,
        )
        total += w * value[None, :]
    result = tl.sum(total, 1)
    if HAS_BIAS:
        added = tl.load(bias + out, mask=in_output, other=0.0).to(tl.float32)
        result += tl.where(split == 0, added, 0.0)
    result = tl.where(wrong != 0, float("nan"), result)
    row = split * tl.num_programs(0).to(tl.int64) + n
    tl.store(y + row * out_features + out, result.to(y.dtype.element_ty), mask=in_output)


@triton.jit(do_not_specialize=["parts"])
def add_parts(sums, y, size, parts, SIZE: tl.constexpr):
    """y (size): the sum of sums (parts, size), part after part."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.float32)
    for part in range(parts):
        total += tl.load(sums + part * size + at, mask=at < size, other=0.0)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=at < size)
