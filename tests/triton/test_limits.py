"""What is too large for kernels is an error, or the reference; tensors on the meta device, so nothing needs memory."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from blockgate.grid import BlockGrid
from blockgate.ops.gated_linear import triton as linear
from blockgate.ops.gated_linear.triton_cut import few_rows
from blockgate.ops.gpu import NotServedError


def problem(rows: int, m: int, n: int, block: tuple[int, int], entries: int = 1):
    meta = torch.device("meta")
    gates = torch.empty(rows, entries, device=meta)
    return (
        torch.empty(rows, n, device=meta),
        torch.empty(m, n, device=meta),
        gates,
        torch.empty(rows, entries, dtype=torch.int64, device=meta),
        block,
    )


def forward(x, weight, gates, indices, block):
    return linear.gated_linear(x, weight, None, gates, indices, block)


def backward(x, weight, gates, indices, block):
    grad = torch.empty(len(x), len(weight), device="meta")
    return linear.gated_linear_backward(grad, x, weight, gates, indices, block, True, True, True)


# 65,536 rows of blocks, columns of blocks, or parts of a block: one more than GPUs take along this dimension.
@pytest.mark.parametrize(
    ("call", "rows", "shape", "launch"),
    [
        (forward, 1, (65536, 1, (1, 1)), "1 x 65536 x 1"),
        (forward, 40, (65536, 1, (1, 1)), "1 x 65536 x 1"),
        (backward, 40, (1, 65536, (1, 1)), "1 x 65536 x 1"),
        (backward, 40, (128 * 65536, 1, (128 * 65536, 1)), "1 x 65536 x 1"),
        (backward, 40, (1, 128 * 65536, (1, 128 * 65536)), "1 x 1 x 65536"),
    ],
)
def test_launches_that_no_gpu_takes(call, rows, shape, launch):
    with pytest.raises(NotServedError, match=f"^a launch of {launch} programs; GPUs take"):
        call(*problem(rows, *shape))


@pytest.mark.parametrize("call", [forward, backward])
def test_lists_that_32_bits_cannot_count(call):
    rows, m, n, block = 1 << 21, 1 << 10, 1 << 10, (4, 8)
    assert BlockGrid(m, n, block).num_blocks * rows // 32 == 1 << 31
    with pytest.raises(NotServedError, match="32768 blocks for 2097152 rows; kernels list up to"):
        call(*problem(rows, m, n, block))


def test_more_gates_than_32_bits_count():
    with pytest.raises(NotServedError, match="2147483648 gates in one call"):
        forward(*problem(1 << 21, 1 << 10, 1 << 10, (8, 8), 1 << 10))


@pytest.mark.parametrize(
    ("rows", "shape", "open_", "splits"),
    [
        (1, (768, 3072), 0.5, 3),
        (1, (768, 3072), 1.0, 6),
        (1, (768, 3072), 0.25, 1),  # short sums
        (1, (4096, 11008), 0.5, 2),
        (1, (6144, 1536), 1.0, 1),  # enough programs
        (16, (768, 3072), 1.0, 1),
        (4, (768, 3072), 1.0, 2),
    ],
)
def test_when_programs_share_the_open_blocks_of_an_output(rows, shape, open_, splits):
    grid = BlockGrid(*shape, (256, 16))
    assert few_rows(rows, int(grid.num_blocks * open_), grid, 2).splits == splits
