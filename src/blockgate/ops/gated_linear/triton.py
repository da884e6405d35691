"""The gated product on a GPU: which kernels run for which number of rows, and what they are given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from blockgate.grid import BlockGrid
from blockgate.ops.gated_linear.triton_cut import (
    FEW_ROWS,
    WIDEST_BLOCK,
    WORD,
    block_sizes,
    checked_launch,
    few_rows,
    power_of_two,
    rows_at_once,
    tile_words,
    warps_for,
)
from blockgate.ops.gated_linear.triton_lists import by_entry, list_rows
from blockgate.ops.gated_linear.triton_rows import FORMATS, add_parts, rows_forward
from blockgate.ops.gated_linear.triton_tiles import tiles_forward, tiles_input_grad, tiles_weight_grad
from blockgate.ops.gated_linear.triton_tuned import run
from blockgate.ops.gpu import NotServedError, interpreting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Stored", "gated_linear", "gated_linear_backward", "product"]

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Stored(NamedTuple):
    """A weight as kernels read it."""

    weight: Tensor
    scale: Tensor
    name: str  # one of FORMATS
    strides: tuple[int, int]
    lines: int


def _precision() -> str:
    """How float32 is multiplied: as torch's own products are set to."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _dot_dtype(dtype: torch.dtype) -> Any:
    # The interpreter would compute with the bits of bfloat16.
    return tl.float32 if interpreting() else _DTYPES[dtype]


def _check(x: Tensor, gates: Tensor, indices: Tensor) -> None:
    if x.dtype not in _DTYPES:
        raise NotServedError(f"the input is {x.dtype}; kernels multiply float32, float16 and bfloat16")
    if gates.dtype is not torch.float32 or indices.dtype is not torch.int64:
        raise NotServedError(f"gates are {gates.dtype} and indices {indices.dtype}; kernels read float32 and int64")
    if gates.numel() >= 1 << 31:
        raise NotServedError(f"{gates.numel()} gates in one call; kernels count up to 2^31. Use smaller batches")


def product(x: Tensor, stored: Stored, bias: Tensor | None, gates: Tensor, indices: Tensor, grid: BlockGrid) -> Tensor:
    """y (N, m) for x (N, n) and a stored weight, by the kernels for few rows or for many."""
    _check(x, gates, indices)
    y = x.new_empty(len(x), grid.out_features)
    if not len(x):
        return y
    gates, indices = gates.contiguous(), indices.contiguous()
    few = len(x) <= FEW_ROWS and block_sizes(grid)[1] <= WIDEST_BLOCK
    (_few_rows if few else _many_rows)(x, stored, bias, gates, indices, grid, y)
    return y


def _few_rows(
    x: Tensor, stored: Stored, bias: Tensor | None, gates: Tensor, indices: Tensor, grid: BlockGrid, y: Tensor
) -> None:
    rows, entries = gates.shape
    m, n, (block_out, block_in) = grid.out_features, grid.in_features, block_sizes(grid)
    cut = few_rows(rows, entries, grid, stored.weight.element_size())
    sums = y if cut.splits == 1 else y.new_empty(cut.splits, rows, m, dtype=torch.float32)
    run(
        rows_forward,
        lambda chosen: checked_launch(rows, grid.out_blocks, -(-block_out // chosen["OUTPUTS"]) * cut.splits),
        x,
        stored.weight,
        stored.scale,
        bias if bias is not None else y,
        gates,
        indices,
        sums,
        entries,
        cut.splits,
        m,
        n,
        block_out,
        block_in,
        grid.in_blocks,
        grid.num_blocks,
        stored.lines,
        *x.stride(),
        *stored.strides,
        cut={"OUTPUTS": cut.outputs, "num_warps": 4},
        FORMAT=FORMATS.index(stored.name),
        HAS_BIAS=bias is not None,
        BLOCK_IN=cut.width,
        AT_ONCE=cut.at_once,
        SCAN=1024,
    )
    if cut.splits > 1:
        add_parts[(triton.cdiv(y.numel(), 256),)](sums, y, y.numel(), cut.splits, SIZE=256)


def _many_rows(
    x: Tensor, stored: Stored, bias: Tensor | None, gates: Tensor, indices: Tensor, grid: BlockGrid, y: Tensor
) -> None:
    rows, entries = gates.shape
    m, n, (block_out, block_in) = grid.out_features, grid.in_features, block_sizes(grid)
    outputs, words = power_of_two(block_out, 16, 128), -(-rows // WORD)
    parts = -(-block_out // outputs)
    a_tile = tile_words(words, grid.out_blocks * parts)
    programs = checked_launch(-(-words // a_tile), grid.out_blocks, parts)
    lists = list_rows(x, gates, indices, grid.num_blocks)
    width, at_once = power_of_two(block_in, 16, 1 << 30), rows_at_once(entries, grid.num_blocks, a_tile)
    if x.dtype is torch.float32 and _precision() == "tf32":
        # With 64, registers spill on sm_80 and sm_100.
        at_once = min(at_once, 32)
    sums = y if y.dtype is torch.float32 else torch.empty_like(y, dtype=torch.float32)
    # Loading the next rows ahead, as one-step blocks would, makes registers spill on sm_80 and sm_100.
    cut = {"ROWS": at_once, "num_warps": warps_for(at_once * outputs), "num_stages": 1 if width <= 32 else 3}
    run(
        tiles_forward,
        lambda _: programs,
        x,
        stored.weight,
        stored.scale,
        bias if bias is not None else y,
        sums,
        y,
        lists.starts,
        lists.rows,
        lists.gates,
        lists.wrong,
        rows,
        words,
        m,
        n,
        block_out,
        block_in,
        grid.in_blocks,
        stored.lines,
        *x.stride(),
        *stored.strides,
        cut=cut,
        FORMAT=FORMATS.index(stored.name),
        HAS_BIAS=bias is not None,
        TILE_WORDS=a_tile,
        OUTPUTS=outputs,
        DEPTH=min(width, 32),
        BLOCK_IN=width,
        DOT=_dot_dtype(x.dtype),
        PRECISION=_precision(),
    )


def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, gates: Tensor, indices: Tensor, block: Sequence[int]
) -> Tensor:
    """As `reference.gated_linear`; a row with an index outside of the grid becomes NaN, since asking would wait.

    x and weight may both be float16 or bfloat16: sums are float32 all the same.
    """
    if weight.dtype != x.dtype:
        raise NotServedError(f"the input is {x.dtype} and the weight {weight.dtype}; kernels need one type")
    grid = BlockGrid(weight.shape[0], weight.shape[1], (block[0], block[1]))
    stored = Stored(weight, weight, "matrix", (weight.stride(0), weight.stride(1)), 0)
    return product(x, stored, bias, gates, indices, grid)


def gated_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    gates: Tensor,
    indices: Tensor,
    block: Sequence[int],
    need_x: bool,
    need_weight: bool,
    need_gates: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.gated_linear_backward`, at the cost of the open blocks; every sum has a fixed order."""
    _check(x, gates, indices)
    if not x.dtype == weight.dtype == grad.dtype:
        raise NotServedError(f"gradient, input and weight are {grad.dtype}, {x.dtype} and {weight.dtype}, not one type")
    grid = BlockGrid(weight.shape[0], weight.shape[1], (block[0], block[1]))
    rows, entries = gates.shape
    m, n, (block_out, block_in) = grid.out_features, grid.in_features, block_sizes(grid)
    grad_x = x.new_empty(x.shape if need_x else 0)
    grad_weight = weight.new_empty(weight.shape if need_weight else 0)
    grad_gates = gates.new_zeros(gates.shape if need_gates else 0)
    if not rows:
        return grad_x, grad_weight.zero_(), grad_gates
    grad, words = grad.contiguous(), -(-rows // WORD)
    outputs, inputs = power_of_two(block_out, 16, 128), power_of_two(block_in, 16, 128)
    parts = -(-block_in // inputs)
    a_tile = tile_words(words, grid.in_blocks * parts)
    input_programs = checked_launch(-(-words // a_tile), grid.in_blocks, parts)
    weight_programs = checked_launch(grid.num_blocks, -(-block_out // outputs), parts)
    lists = list_rows(x, gates.contiguous(), indices.contiguous(), grid.num_blocks)
    dot = {"DOT": _dot_dtype(x.dtype), "PRECISION": _precision()}
    if need_x or need_gates:
        at_once = rows_at_once(entries, grid.num_blocks, a_tile)
        sums = grad_x if grad_x.dtype is torch.float32 else torch.empty_like(grad_x, dtype=torch.float32)
        slot_grads = gates.new_empty(parts, gates.numel())
        # With more stages, registers spill on sm_80.
        stages = 2 if x.dtype is torch.float32 else 3
        run(
            tiles_input_grad,
            lambda _: input_programs,
            grad,
            x,
            weight,
            sums,
            grad_x,
            slot_grads,
            lists.starts,
            lists.rows,
            lists.gates,
            rows,
            words,
            gates.numel(),
            m,
            n,
            block_out,
            block_in,
            grid.out_blocks,
            grid.in_blocks,
            *x.stride(),
            *weight.stride(),
            cut={"ROWS": at_once, "num_warps": warps_for(at_once * inputs), "num_stages": stages},
            NEED_X=need_x,
            NEED_GATES=need_gates,
            TILE_WORDS=a_tile,
            INPUTS=inputs,
            DEPTH=power_of_two(block_out, 16, 32),
            **dot,
        )
        if need_gates:
            grad_gates = by_entry(slot_grads, lists)
    if need_weight:
        run(
            tiles_weight_grad,
            lambda _: weight_programs,
            grad,
            x,
            grad_weight,
            lists.starts,
            lists.rows,
            lists.gates,
            words,
            m,
            n,
            block_out,
            block_in,
            grid.in_blocks,
            *x.stride(),
            cut={"ROWS": 32, "num_warps": warps_for(outputs * inputs)},
            OUTPUTS=outputs,
            INPUTS=inputs,
            **dot,
        )
    return grad_x, grad_weight, grad_gates
