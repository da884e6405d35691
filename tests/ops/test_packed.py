"""Packed ops against their reference: layout, products, the fused call, tracing, bad input."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockgate.grid import BlockGrid
from blockgate.ops import packed_linear as packed
from tests.helpers import assert_close
from tests.ops import reference

dimension = st.integers(1, 70)
dtypes = st.sampled_from(packed.PACKED_DTYPES)


def test_layout_by_hand():
    weight = torch.arange(6.0).view(2, 3)  # blocks of 2 x 2: two of them, the second ragged
    blocks, scale = packed.pack_blocks(weight, 2, 2, torch.float32)
    assert blocks.shape == (2, 1, 2, 16)
    assert scale.numel() == 0
    assert blocks[0, 0, :, :2].tolist() == [[0.0, 3.0], [1.0, 4.0]]
    assert blocks[1, 0, :, :2].tolist() == [[2.0, 5.0], [0.0, 0.0]]
    assert blocks[..., 2:].count_nonzero() == 0


def test_int8_by_hand():
    blocks, scale = packed.pack_blocks(torch.tensor([[127.0, -63.4], [0.0, 0.0]]), 2, 2, torch.int8)
    assert blocks[0, 0, :, :2].tolist() == [[127, 0], [-63, 0]]
    assert scale[0, :2].tolist() == [1.0, 0.0]


@given(dimension, dimension, dimension, dimension, dtypes)
def test_packing_equals_the_reference_and_comes_back(m, n, block_out, block_in, dtype):
    weight = torch.randn(m, n)
    got, want = (p.pack_blocks(weight, block_out, block_in, dtype) for p in (packed, reference))
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    back = packed.unpack_blocks(*got, m, n, block_out, block_in)
    torch.testing.assert_close(back, reference.unpack_blocks(*want, m, n, block_out, block_in), rtol=0, atol=0)
    if dtype == torch.float32:
        torch.testing.assert_close(back, weight, rtol=0, atol=0)


@given(dimension, dimension, dimension, dimension, dtypes, st.integers(0, 20), st.booleans())
def test_products_equal_the_reference(m, n, block_out, block_in, dtype, rows, with_bias):
    grid = BlockGrid(m, n, (block_out, block_in))
    x, weight = torch.randn(rows, n), torch.randn(m, n)
    bias = torch.randn(m) if with_bias else None
    stored = packed.pack_blocks(weight, block_out, block_in, dtype)
    gates, indices = reference.topk_gates(torch.randn(rows, grid.num_blocks), (grid.num_blocks + 1) // 2, 1, "rms")
    for name, extra in (("packed_linear", (gates, indices)), ("dense_packed_linear", ())):
        arguments = (x, *stored, bias, *extra, m, block_out, block_in)
        assert_close(getattr(packed, name)(*arguments), getattr(reference, name)(*arguments), name)


@given(dimension, dimension, st.integers(4, 40), dtypes, st.integers(0, 9), st.booleans(), st.booleans())
def test_the_fused_call_equals_the_reference(m, n, block, dtype, rows, hidden, per_row):
    arguments = fused_arguments(m, n, block, dtype, rows, hidden, per_row)
    # Bits of the scores may differ between the two, so only rows whose choice is clear can be compared: all of them,
    # since random float32 scores hardly ever lie within rounding of each other.
    assert_close(packed.dynamic_linear(*arguments), reference.dynamic_linear(*arguments))


def fused_arguments(m, n, block, dtype, rows, hidden, per_row):
    grid = BlockGrid(m, n, block)
    offset, key = n // 3, n - n // 3
    x = torch.randn(rows, n)
    scored = 6 if hidden else key
    gate_weight = torch.randn(grid.num_blocks, scored)
    groups = grid.out_blocks if per_row else 1
    return (
        x,
        *packed.pack_blocks(torch.randn(m, n), block, block, dtype),
        torch.randn(m),
        packed.pack_blocks(gate_weight, *gate_weight.shape, torch.float32)[0],
        torch.randn(grid.num_blocks),
        packed.pack_blocks(torch.randn(6, key), 6, key, torch.float32)[0] if hidden else None,
        torch.randn(6) if hidden else None,
        offset,
        key,
        grid.num_blocks,
        6 if hidden else 0,
        m,
        block,
        block,
        (grid.num_blocks // groups + 1) // 2,
        groups,
        "mean",
    )


@pytest.mark.parametrize("suffix", ["", "_reference"])
@pytest.mark.parametrize("dtype", packed.PACKED_DTYPES)
def test_opcheck(suffix, dtype):
    weight, x = torch.randn(20, 12), torch.randn(3, 12)
    stored = packed.pack_blocks(weight, 8, 5, dtype)
    gates, indices = reference.topk_gates(torch.randn(3, 9), 4, 1, "mean")
    checks = {
        "pack_blocks": (weight, 8, 5, dtype),
        "unpack_blocks": (*stored, 20, 12, 8, 5),
        "packed_linear": (x, *stored, None, gates, indices, 20, 8, 5),
        "dense_packed_linear": (x, *stored, torch.randn(20), 20, 8, 5),
        "dynamic_linear": fused_arguments(20, 12, 5, dtype, 3, hidden=True, per_row=False),
    }
    for name, arguments in checks.items():
        torch.library.opcheck(getattr(torch.ops.blockgate, name + suffix), arguments)


def test_blocks_of_another_grid_are_refused():
    stored = packed.pack_blocks(torch.randn(20, 12), 8, 8, torch.float32)
    with pytest.raises(RuntimeError, match=r"expected|shape"):
        packed.dense_packed_linear(torch.randn(2, 12), *stored, None, 20, 4, 4)
