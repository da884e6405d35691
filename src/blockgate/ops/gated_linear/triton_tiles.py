"""The gated product of many rows on tensor cores, forward and backward, block by block over the rows that open it.

A program owns a tile of the result: some words of 32 rows and one row of blocks (or one column, for the gradient of x).
It takes the blocks in order, gathers the rows that open each from its list, multiplies them, and adds the products to
its tile in memory, where the caches keep it. Nobody else writes there, so the order of every sum is fixed without
atomics, and no row pays for another row's blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockgate.ops.gated_linear.triton_rows import weight_at

__all__ = ["tiles_forward", "tiles_input_grad", "tiles_weight_grad"]


@triton.jit
def tiles_forward(
    x,
    weight,
    scale,
    bias,
    sums,
    y,
    starts,
    rows,
    gates,
    wrong,
    count,
    words,
    out_features,
    in_features,
    block_out,
    block_in,
    in_blocks,
    lines,
    stride_xn,
    stride_xk,
    stride_o,
    stride_k,
    FORMAT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile, i, part): OUTPUTS outputs of row of blocks i for a tile of rows. `sums` is float32, (N, m)."""
    first_word, i = tl.program_id(0) * TILE_WORDS, tl.program_id(1)
    last_word = tl.minimum(first_word + TILE_WORDS, words)
    o = tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS)
    out = i * block_out + o
    in_output = (o < block_out) & (out < out_features)
    start = tl.zeros([OUTPUTS], tl.float32)
    if HAS_BIAS:
        start = tl.load(bias + out, mask=in_output, other=0.0).to(tl.float32)
    for word in range(first_word, last_word):
        n = word * 32 + tl.arange(0, 32)
        mask = (n < count)[:, None] & in_output[None, :]
        at = n.to(tl.int64)[:, None] * out_features + out[None, :]
        tl.store(sums + at, tl.zeros([32, OUTPUTS], tl.float32) + start[None, :], mask=mask)
    tl.debug_barrier()
    for j in range(in_blocks):
        block = i * in_blocks + j
        low = tl.load(starts + block.to(tl.int64) * words + first_word)
        high = tl.load(starts + block.to(tl.int64) * words + last_word)
        for first in range(low, high, ROWS):
            slot = first + tl.arange(0, ROWS)
            listed = slot < high
            n = tl.load(rows + slot, mask=listed, other=0).to(tl.int64)
            gate = tl.load(gates + slot, mask=listed, other=0.0)
            product = tl.zeros([ROWS, OUTPUTS], tl.float32)
            for depth in range(0, BLOCK_IN, DEPTH):
                k = depth + tl.arange(0, DEPTH)
                feature = (j * block_in + k).to(tl.int64)
                in_input = (k < block_in) & (feature < in_features)
                value = tl.load(
                    x + n[:, None] * stride_xn + feature[None, :] * stride_xk,
                    mask=listed[:, None] & in_input[None, :],
                    other=0.0,
                )
                w = weight_at(
                    weight,
                    scale,
                    block,
                    i,
                    j,
                    o[None, :],
                    k[:, None],
                    in_input[:, None] & in_output[None, :],
                    stride_o,
                    stride_k,
                    block_out,
                    block_in,
                    lines,
                    FORMAT,
                )
                product = tl.dot(value.to(DOT), w.to(DOT), product, input_precision=PRECISION)
            mask = listed[:, None] & in_output[None, :]
            at = sums + n[:, None] * out_features + out[None, :]
            tl.store(at, tl.load(at, mask=mask, other=0.0) + gate[:, None] * product, mask=mask)
        # Other threads of the program add the next block's products to the same cells.
        tl.debug_barrier()
    for word in range(first_word, last_word):
        n = word * 32 + tl.arange(0, 32)
        mask = (n < count)[:, None] & in_output[None, :]
        at = n.to(tl.int64)[:, None] * out_features + out[None, :]
        spoilt = tl.load(wrong + n, mask=n < count, other=0) != 0
        total = tl.where(spoilt[:, None], float("nan"), tl.load(sums + at, mask=mask, other=0.0))
        tl.store(y + at, total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def tiles_input_grad(
    grad,
    x,
    weight,
    sums,
    grad_x,
    slot_grads,
    starts,
    rows,
    gates,
    count,
    words,
    slots,
    out_features,
    in_features,
    block_out,
    block_in,
    out_blocks,
    in_blocks,
    stride_xn,
    stride_xk,
    stride_o,
    stride_k,
    NEED_X: tl.constexpr,
    NEED_GATES: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile, j, part): the gradients of INPUTS inputs of column of blocks j, and of the gates, for some rows.

    `sums` is float32, (N, n); `slot_grads` (parts, slots) has what each part of a block adds to the gate of a slot.
    """
    first_word, j, part = tl.program_id(0) * TILE_WORDS, tl.program_id(1), tl.program_id(2)
    last_word = tl.minimum(first_word + TILE_WORDS, words)
    k = part * INPUTS + tl.arange(0, INPUTS)
    feature = (j * block_in + k).to(tl.int64)
    in_input = (k < block_in) & (feature < in_features)
    if NEED_X:
        for word in range(first_word, last_word):
            n = word * 32 + tl.arange(0, 32)
            mask = (n < count)[:, None] & in_input[None, :]
            at = n.to(tl.int64)[:, None] * in_features + feature[None, :]
            tl.store(sums + at, tl.zeros([32, INPUTS], tl.float32), mask=mask)
        tl.debug_barrier()
    for i in range(out_blocks):
        place = (i * in_blocks + j).to(tl.int64) * words
        low, high = tl.load(starts + place + first_word), tl.load(starts + place + last_word)
        for first in range(low, high, ROWS):
            slot = first + tl.arange(0, ROWS)
            listed = slot < high
            n = tl.load(rows + slot, mask=listed, other=0).to(tl.int64)
            product = tl.zeros([ROWS, INPUTS], tl.float32)
            for depth in range(0, block_out, DEPTH):
                o = depth + tl.arange(0, DEPTH)
                out = i * block_out + o
                in_output = (o < block_out) & (out < out_features)
                slope = tl.load(
                    grad + n[:, None] * out_features + out[None, :],
                    mask=listed[:, None] & in_output[None, :],
                    other=0.0,
                )
                w = tl.load(
                    weight + out.to(tl.int64)[:, None] * stride_o + feature[None, :] * stride_k,
                    mask=in_output[:, None] & in_input[None, :],
                    other=0.0,
                )
                product = tl.dot(slope.to(DOT), w.to(DOT), product, input_precision=PRECISION)
            mask = listed[:, None] & in_input[None, :]
            if NEED_GATES:
                value = tl.load(x + n[:, None] * stride_xn + feature[None, :] * stride_xk, mask=mask, other=0.0)
                along = tl.sum(product * value.to(tl.float32), 1)
                tl.store(slot_grads + part.to(tl.int64) * slots + slot, along, mask=listed)
            if NEED_X:
                gate = tl.load(gates + slot, mask=listed, other=0.0)
                at = sums + n[:, None] * in_features + feature[None, :]
                tl.store(at, tl.load(at, mask=mask, other=0.0) + gate[:, None] * product, mask=mask)
        tl.debug_barrier()
    if NEED_X:
        for word in range(first_word, last_word):
            n = word * 32 + tl.arange(0, 32)
            mask = (n < count)[:, None] & in_input[None, :]
            at = n.to(tl.int64)[:, None] * in_features + feature[None, :]
            tl.store(grad_x + at, tl.load(sums + at, mask=mask, other=0.0).to(grad_x.dtype.element_ty), mask=mask)


@triton.jit
def tiles_weight_grad(
    grad,
    x,
    grad_weight,
    starts,
    rows,
    gates,
    words,
    out_features,
    in_features,
    block_out,
    block_in,
    in_blocks,
    stride_xn,
    stride_xk,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (block, part of its outputs, part of its inputs): a sum over all rows that open the block."""
    block = tl.program_id(0)
    i, j = block // in_blocks, block % in_blocks
    o = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.program_id(2) * INPUTS + tl.arange(0, INPUTS)
    out, feature = i * block_out + o, (j * block_in + k).to(tl.int64)
    in_output, in_input = (o < block_out) & (out < out_features), (k < block_in) & (feature < in_features)
    total = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    low = tl.load(starts + block.to(tl.int64) * words)
    high = tl.load(starts + (block + 1).to(tl.int64) * words)
    for first in range(low, high, ROWS):
        slot = first + tl.arange(0, ROWS)
        listed = slot < high
        n = tl.load(rows + slot, mask=listed, other=0).to(tl.int64)
        gate = tl.load(gates + slot, mask=listed, other=0.0)
        # Loaded with outputs along the rows: the first factor of the product.
        slope = tl.load(
            grad + n[None, :] * out_features + out[:, None], mask=in_output[:, None] & listed[None, :], other=0.0
        )
        value = tl.load(
            x + n[:, None] * stride_xn + feature[None, :] * stride_xk,
            mask=listed[:, None] & in_input[None, :],
            other=0.0,
        )
        weighted = slope.to(tl.float32) * gate[None, :]
        total = tl.dot(weighted.to(DOT), value.to(DOT), total, input_precision=PRECISION)
    at = out.to(tl.int64)[:, None] * in_features + feature[None, :]
    tl.store(grad_weight + at, total.to(grad_weight.dtype.element_ty), mask=in_output[:, None] & in_input[None, :])
