"""Packed ops against their reference: layout, products, the fused call, tracing, bad input."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockgate.formats import FORMATS
from blockgate.grid import BlockGrid
from blockgate.ops import native
from blockgate.ops import packed_linear as packed
from tests.helpers import assert_close
from tests.ops import reference

dimension = st.integers(1, 70)
formats = st.sampled_from(sorted(FORMATS))
needs_kernels = pytest.mark.skipif(native.unavailable_reason() is not None, reason="native kernels are not built")


def test_layout_by_hand():
    weight = torch.arange(6.0).view(2, 3)  # blocks of 2 x 2: two of them, the second ragged
    blocks, scale = packed.pack_blocks(weight, (2, 2), "float32")
    assert blocks.shape == (2, 1, 2, 16)
    assert scale.numel() == 0
    assert blocks[0, 0, :, :2].tolist() == [[0.0, 3.0], [1.0, 4.0]]
    assert blocks[1, 0, :, :2].tolist() == [[2.0, 5.0], [0.0, 0.0]]
    assert blocks[..., 2:].count_nonzero() == 0


def test_int8_by_hand():
    blocks, scale = packed.pack_blocks(torch.tensor([[127.0, -63.4], [0.0, 0.0]]), (2, 2), "int8")
    assert blocks.shape == (1, 1, 1, 32)  # two inputs side by side
    assert blocks[0, 0, 0, :4].tolist() == [127, -63, 0, 0]
    assert scale[0, :2].tolist() == [1.0, 0.0]


def test_int4_by_hand():
    # 33 inputs: a group of 32 whose largest weight is -8, and a group of one.
    weight = torch.zeros(2, 33)
    weight[0, :4] = torch.tensor([-8.0, 7.0, -1.0, 2.0])
    weight[0, 32] = 3.0
    blocks, scale = packed.pack_blocks(weight, (2, 33), "int4")
    assert blocks.shape == (1, 1, 17, 16)
    assert blocks.dtype == torch.uint8
    assert blocks[0, 0, [0, 1, 16], 0].tolist() == [0x78, 0x2F, 0x08]
    assert blocks.count_nonzero() == 3
    assert scale.shape == (1, 2, 16)
    assert scale[0, :, 0].tolist() == [1.0, -3 / 8]
    torch.testing.assert_close(packed.unpack_blocks(blocks, scale, (2, 33, 2, 33), "int4"), weight, rtol=0, atol=0)


@given(dimension, dimension, dimension, dimension, formats)
def test_packing_equals_the_reference_and_comes_back(m, n, block_out, block_in, name):
    weight = torch.randn(m, n)
    got, want = (p.pack_blocks(weight, (block_out, block_in), name) for p in (packed, reference))
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    grid = (m, n, block_out, block_in)
    back = packed.unpack_blocks(*got, grid, name)
    torch.testing.assert_close(back, reference.unpack_blocks(*want, grid, name), rtol=0, atol=0)
    if name == "float32":
        torch.testing.assert_close(back, weight, rtol=0, atol=0)


@given(dimension, dimension, dimension, dimension, formats, st.integers(0, 20), st.booleans())
def test_products_equal_the_reference(m, n, block_out, block_in, name, rows, with_bias):
    grid = BlockGrid(m, n, (block_out, block_in))
    x, weight = torch.randn(rows, n), torch.randn(m, n)
    bias = torch.randn(m) if with_bias else None
    stored = packed.pack_blocks(weight, grid.block, name)
    gates, indices = reference.topk_gates(torch.randn(rows, grid.num_blocks), ((grid.num_blocks + 1) // 2, 1), "rms")
    for product, extra in (("packed_linear", (gates, indices)), ("dense_packed_linear", ())):
        arguments = (x, *stored, bias, *extra, (m, n, block_out, block_in), name)
        assert_close(getattr(packed, product)(*arguments), getattr(reference, product)(*arguments), product)


@needs_kernels
@given(dimension, dimension, st.integers(4, 40), formats, st.integers(0, 9), st.booleans(), st.booleans())
def test_a_prepared_layer_equals_the_separate_references(m, n, block, name, rows, hidden, per_row):
    grid = BlockGrid(m, n, block)
    key = (n // 3, n - n // 3)
    gate = [torch.randn(grid.num_blocks, 6 if hidden else key[1]), torch.randn(grid.num_blocks)]
    hidden_layer = [torch.randn(6, key[1]), torch.randn(6)] if hidden else [None, None]
    groups = grid.out_blocks if per_row else 1
    opened = (grid.num_blocks // groups + 1) // 2
    x, bias, sizes = torch.randn(rows, n), torch.randn(m), (m, n, block, block)
    stored = packed.pack_blocks(torch.randn(m, n), (block, block), name)

    packed_gate, packed_hidden = (
        None if w is None else packed.pack_blocks(w, w.shape, "float32")[0] for w in (gate[0], hidden_layer[0])
    )
    handle = packed.prepare_dynamic_linear(
        *stored, bias, sizes, name, packed_gate, gate[1], packed_hidden, hidden_layer[1], key, groups, "mean"
    )
    got = packed.run_prepared_linear(x, handle, opened)
    packed.release_prepared_linear(handle)

    scored = x[:, key[0] : key[0] + key[1]]
    if hidden:
        scored = torch.relu(reference.gate_scores(scored, *hidden_layer))
    gates, indices = reference.topk_gates(reference.gate_scores(scored, *gate), (opened, groups), "mean")
    # Bits of the scores may differ between the two, so only rows whose choice is clear can be compared: all of them,
    # since random float32 scores hardly ever lie within rounding of each other.
    assert_close(got, reference.packed_linear(x, *stored, bias, gates, indices, sizes, name))


@pytest.mark.parametrize("suffix", ["", "_reference"])
@pytest.mark.parametrize("name", FORMATS)
def test_opcheck(suffix, name):
    weight, x = torch.randn(20, 12), torch.randn(3, 12)
    stored = packed.pack_blocks(weight, (8, 5), name)
    gates, indices = reference.topk_gates(torch.randn(3, 9), (4, 1), "mean")
    checks = {
        "pack_blocks": (weight, [8, 5], name),
        "unpack_blocks": (*stored, [20, 12, 8, 5], name),
        "packed_linear": (x, *stored, None, gates, indices, [20, 12, 8, 5], name),
        "dense_packed_linear": (x, *stored, torch.randn(20), [20, 12, 8, 5], name),
    }
    for op, arguments in checks.items():
        torch.library.opcheck(getattr(torch.ops.blockgate, op + suffix), arguments)


def test_blocks_of_another_grid_are_refused():
    stored = packed.pack_blocks(torch.randn(20, 12), (8, 8), "float32")
    with pytest.raises(RuntimeError, match=r"expected|shape"):
        packed.dense_packed_linear(torch.randn(2, 12), *stored, None, (20, 12, 4, 4), "float32")


@needs_kernels
@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        (
            "dense_packed_linear",
            (None, [20, 12, 8], "float32"),
            "grid: expected 4 integers (out_features, in_features, block_out",
        ),
        (
            "dense_packed_linear",
            (None, [20, 11, 8, 8], "float32"),
            "x: expected size 11 in dimension 1, got shape (2, 12)",
        ),
        ("pack_blocks", ([8], "float32"), "block: expected 2 integers (out, in), got 1"),
        ("pack_blocks", ([8, 8], "int7"), "format: expected one of float32, bfloat16, float16, int8"),
    ],
)
def test_wrong_groups_and_formats_are_refused(op, arguments, message):
    weight, x = torch.randn(20, 12), torch.randn(2, 12)
    tensors = (weight,) if op == "pack_blocks" else (x, *packed.pack_blocks(weight, (8, 8), "float32"))
    with pytest.raises(RuntimeError, match=re.escape(message)):
        getattr(packed, op)(*tensors, *arguments)


@pytest.mark.skipif(native.unavailable_reason() is not None, reason="native kernels are not built")
def test_sizes_near_the_largest_integer_do_not_wrap():
    largest, bound = 2**63 - 1, 2**40
    weight, ops = torch.randn(20, 12), torch.ops.blockgate
    # One block that is larger than the weight, however much larger.
    blocks, scale = ops.pack_blocks(weight, [bound, bound], "float32")
    assert blocks.shape == (1, 2, 12, 16)
    torch.testing.assert_close(ops.unpack_blocks(blocks, scale, [20, 12, bound, bound], "float32"), weight)
    for block in ([largest, 8], [8, largest], [bound + 1, 8], [8, bound + 1]):
        message = re.escape(
            f"expected sizes of at most 2^40, got a weight (20, 12) in blocks of ({block[0]}, {block[1]})"
        )
        with pytest.raises(RuntimeError, match=message):
            ops.pack_blocks(weight, block, "float32")
        with pytest.raises(RuntimeError, match=message):
            ops.unpack_blocks(blocks, scale, [20, 12, *block], "float32")
    gate, _ = ops.pack_blocks(torch.randn(1, 5), [1, 5], "float32")
    with pytest.raises(RuntimeError, match=f"key: expected a part of the 12 input features, got 5 from {largest}"):
        ops.prepare_dynamic_linear(
            blocks, scale, None, [20, 12, 20, 12], "float32", gate, None, None, None, [largest, 5], 1, "rms"
        )
