"""The gated product on a GPU: which kernels run for which number of rows, and how their work is cut.

The cut follows from shapes only: a ramp of the sparsity compiles at most three variants, and results do not depend on
what was measured on the day.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from blockgate.grid import BlockGrid
from blockgate.ops.gated_linear.triton_lists import WORD, by_entry, list_rows
from blockgate.ops.gated_linear.triton_rows import FORMATS, rows_forward
from blockgate.ops.gated_linear.triton_tiles import tiles_forward, tiles_input_grad, tiles_weight_grad
from blockgate.ops.gpu import NotServedError, interpreting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Stored", "gated_linear", "gated_linear_backward", "product"]

# Up to so many rows, each takes its own blocks; above, blocks take their rows.
FEW_ROWS = 16
# How many programs fill a large GPU twice.
ENOUGH_PROGRAMS = 432
# Programs of a launch along its second and third dimension.
MOST_PROGRAMS = 65535
# Inputs of a block that a program for one row holds.
WIDEST_BLOCK = 1024

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Stored(NamedTuple):
    """A weight as kernels read it."""

    weight: Tensor
    scale: Tensor
    name: str  # one of FORMATS
    strides: tuple[int, int]
    lines: int


def _power(size: int, least: int, most: int) -> int:
    return max(least, min(most, int(triton.next_power_of_2(size))))


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


def _launch(*counts: int) -> tuple[int, ...]:
    """The numbers of programs of a launch, which GPUs limit."""
    if max(counts[1:]) > MOST_PROGRAMS or counts[0] >= 1 << 31:
        raise NotServedError(f"a launch of {' x '.join(map(str, counts))} programs; GPUs take 2^31 x 65535 x 65535")
    return counts


def _sizes(grid: BlockGrid) -> tuple[int, int, int, int]:
    """Features out and in, and the size of a block that may be larger than the weight."""
    m, n = grid.out_features, grid.in_features
    return m, n, min(grid.block[0], m), min(grid.block[1], n)


def _tile_words(words: int, programs: int) -> int:
    """How many words of rows a program takes: four, or fewer where too few programs would be left."""
    size = 4
    while size > 1 and -(-words // size) * programs < ENOUGH_PROGRAMS:
        size //= 2
    return size


def _rows_at_once(entries: int, num_blocks: int, tile_words: int) -> int:
    """Rows of one product: about what a tile's list of a block has."""
    expected = tile_words * WORD * entries / num_blocks
    return 16 if expected <= 24 else 32 if expected <= 48 else 64


def _warps(sums: int) -> int:
    """How many warps hold so many sums in registers: at most 32 in each thread, and the factors beside them."""
    return 8 if sums > 4096 else 4


def product(x: Tensor, stored: Stored, bias: Tensor | None, gates: Tensor, indices: Tensor, grid: BlockGrid) -> Tensor:
    """y (N, m) for x (N, n) and a stored weight, by the kernels for few rows or for many."""
    _check(x, gates, indices)
    rows, entries = gates.shape
    m, n, block_out, block_in = _sizes(grid)
    y = x.new_empty(rows, m)
    if not rows:
        return y
    gates, indices = gates.contiguous(), indices.contiguous()
    common = {"FORMAT": FORMATS.index(stored.name), "HAS_BIAS": bias is not None}
    if rows <= FEW_ROWS and block_in <= WIDEST_BLOCK:
        width = _power(block_in, 1, WIDEST_BLOCK)
        outputs = _power(block_out, 8, 64)
        while outputs > 8 and rows * grid.out_blocks * -(-block_out // outputs) < ENOUGH_PROGRAMS:
            outputs //= 2
        programs = _launch(rows, grid.out_blocks, -(-block_out // outputs))
        rows_forward[programs](
            x,
            stored.weight,
            stored.scale,
            bias if bias is not None else y,
            gates,
            indices,
            y,
            entries,
            m,
            n,
            block_out,
            block_in,
            grid.in_blocks,
            grid.num_blocks,
            stored.lines,
            *x.stride(),
            *stored.strides,
            **common,
            BLOCK_IN=width,
            AT_ONCE=max(1, 128 // width),
            OUTPUTS=outputs,
            SCAN=1024,
        )
        return y
    outputs, words = _power(block_out, 16, 128), -(-rows // WORD)
    parts = -(-block_out // outputs)
    tile_words = _tile_words(words, grid.out_blocks * parts)
    programs = _launch(-(-words // tile_words), grid.out_blocks, parts)
    lists = list_rows(x, gates, indices, grid.num_blocks)
    width, at_once = _power(block_in, 16, 1 << 30), _rows_at_once(entries, grid.num_blocks, tile_words)
    if x.dtype is torch.float32 and _precision() == "tf32":
        # With 64, registers spill on sm_80 and sm_100.
        at_once = min(at_once, 32)
    sums = y if y.dtype is torch.float32 else torch.empty_like(y, dtype=torch.float32)
    tiles_forward[programs](
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
        **common,
        TILE_WORDS=tile_words,
        ROWS=at_once,
        OUTPUTS=outputs,
        DEPTH=min(width, 32),
        BLOCK_IN=width,
        DOT=_dot_dtype(x.dtype),
        PRECISION=_precision(),
        num_warps=_warps(at_once * outputs),
        # Loading the next rows ahead, as one-step blocks would, makes registers spill on sm_80 and sm_100.
        num_stages=1 if width <= 32 else 3,
    )
    return y


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
    m, n, block_out, block_in = _sizes(grid)
    grad_x = x.new_empty(x.shape if need_x else 0)
    grad_weight = weight.new_empty(weight.shape if need_weight else 0)
    grad_gates = gates.new_zeros(gates.shape if need_gates else 0)
    if not rows:
        return grad_x, grad_weight.zero_(), grad_gates
    grad, words = grad.contiguous(), -(-rows // WORD)
    outputs, inputs = _power(block_out, 16, 128), _power(block_in, 16, 128)
    parts = -(-block_in // inputs)
    tile_words = _tile_words(words, grid.in_blocks * parts)
    input_programs = _launch(-(-words // tile_words), grid.in_blocks, parts)
    weight_programs = _launch(grid.num_blocks, -(-block_out // outputs), parts)
    lists = list_rows(x, gates.contiguous(), indices.contiguous(), grid.num_blocks)
    dot = {"DOT": _dot_dtype(x.dtype), "PRECISION": _precision()}
    if need_x or need_gates:
        at_once = _rows_at_once(entries, grid.num_blocks, tile_words)
        sums = grad_x if grad_x.dtype is torch.float32 else torch.empty_like(grad_x, dtype=torch.float32)
        slot_grads = gates.new_empty(parts, gates.numel())
        tiles_input_grad[input_programs](
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
            NEED_X=need_x,
            NEED_GATES=need_gates,
            TILE_WORDS=tile_words,
            ROWS=at_once,
            INPUTS=inputs,
            DEPTH=_power(block_out, 16, 32),
            **dot,
            num_warps=_warps(at_once * inputs),
            # With more, registers spill on sm_80.
            num_stages=2 if x.dtype is torch.float32 else 3,
        )
        if need_gates:
            grad_gates = by_entry(slot_grads, lists)
    if need_weight:
        tiles_weight_grad[weight_programs](
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
            ROWS=32,
            OUTPUTS=outputs,
            INPUTS=inputs,
            **dot,
            num_warps=_warps(outputs * inputs),
        )
    return grad_x, grad_weight, grad_gates
