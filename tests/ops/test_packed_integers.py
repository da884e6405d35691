"""Products with integer weights: exact sums, so the same bits in any batch, and sound at every extreme."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import blockgate as bg
from blockgate.formats import FORMATS
from blockgate.formats.integers import IntegerFormat
from blockgate.grid import BlockGrid
from blockgate.ops import native
from blockgate.ops import packed_linear as packed
from tests.helpers import assert_close
from tests.ops import reference

dimension = st.integers(1, 300)
TINY = torch.finfo(torch.float32).tiny
INTEGERS = [name for name, known in FORMATS.items() if isinstance(known, IntegerFormat)]
each_format = pytest.mark.parametrize("name", INTEGERS)
needs_kernels = pytest.mark.skipif(native.unavailable_reason() is not None, reason="native kernels are not built")


def layer(name, m, n, block_out, block_in, rows):
    """Arguments for a gated and for a dense product: x and everything after it, for any subset of the rows."""
    grid = BlockGrid(m, n, (block_out, block_in))
    stored = packed.pack_blocks(torch.randn(m, n), grid.block, name)
    x, bias = torch.randn(rows, n), torch.randn(m)
    gates, indices = reference.topk_gates(torch.rand(rows, grid.num_blocks), ((grid.num_blocks + 1) // 2, 1), "rms")

    def gated(chosen):
        chosen_gates = (gates[chosen], indices[chosen])
        return packed.packed_linear(x[chosen], *stored, bias, *chosen_gates, (m, n, *grid.block), name)

    def dense(chosen):
        return packed.dense_packed_linear(x[chosen], *stored, bias, (m, n, *grid.block), name)

    return gated, dense


def one_block(name, x, weight):
    """Arguments of dense_packed_linear for a weight that is a single block, smaller than the block size."""
    block = tuple(size + 1 for size in weight.shape)
    return x, *packed.pack_blocks(weight, block, name), None, (*weight.shape, *block), name


@needs_kernels
@given(st.sampled_from(INTEGERS), dimension, dimension, dimension, dimension, st.integers(1, 40))
def test_a_row_does_not_depend_on_its_batch(name, m, n, block_out, block_in, rows):
    for product in layer(name, m, n, block_out, block_in, rows):
        together = product(slice(0, rows))
        for row in {0, rows // 2, rows - 1}:
            torch.testing.assert_close(product(slice(row, row + 1))[0], together[row], rtol=0, atol=0)


@each_format
@needs_kernels
@pytest.mark.parametrize("rows", [1, 5, 7, 40, 300])
def test_threads_change_no_bit(name, rows):
    threads = torch.get_num_threads()
    try:
        for product in layer(name, 500, 301, 64, 67, rows):
            results = []
            for count in (1, 2):
                torch.set_num_threads(count)
                results.append(product(slice(0, rows)))
            torch.testing.assert_close(*results, rtol=0, atol=0)
    finally:
        torch.set_num_threads(threads)


@each_format
@needs_kernels
@pytest.mark.parametrize("height", [16, 80, 112, 144, 272])
@pytest.mark.parametrize("block_rows", [1, 3, 40])
def test_one_row_streams_the_bits_of_a_batch(name, height, block_rows):
    """Whatever number of panels a block has, and however its rows of blocks are shared out; the last one is ragged."""
    m, n = height * block_rows - 5, 50
    torch.manual_seed(0)
    stored = packed.pack_blocks(torch.randn(m, n), (height, 20), name)
    x = torch.randn(40, n)
    batch = packed.dense_packed_linear(x, *stored, None, (m, n, height, 20), name)
    for row in range(3):
        assert torch.equal(
            packed.dense_packed_linear(x[row : row + 1], *stored, None, (m, n, height, 20), name)[0], batch[row]
        )


@each_format
@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("depth", [1, 2, 7, 31, 32, 33, 63, 128, 515, 516, 517, 518, 3001])
def test_sums_are_exact(name, depth, rows):
    weight, x = torch.randn(21, depth), torch.randn(rows, depth)
    known, sizes = FORMATS[name], (21, depth, 21, depth)
    stored = packed.pack_blocks(weight, (21, depth), name)
    group = known.group or depth
    if known.steps == 255:
        low, high = x.amin(1, keepdim=True).clamp_max(0), x.amax(1, keepdim=True).clamp_min(0)
        size = high / 255 - low / 255
    else:
        size = x.abs().amax(1, keepdim=True) / min(32767, (2**31 - 1) // (known.largest * min(depth, group)))
    # One input in several hundred lies on a level of 255 and one more: see round_inputs.
    rounded = known.round_inputs(x, BlockGrid(21, depth, (21, depth)))
    steps = (rounded / size).round().double().split(group, 1)
    weights = packed.unpack_blocks(*stored, sizes, name).split(group, 1)
    scales = stored[1].view(-1, 32)[:, :21]
    want = torch.zeros(rows, 21)
    for inputs, part, scale in zip(steps, weights, scales, strict=True):
        integers = (part / scale[:, None]).round().double()
        want += (size * scale) * (inputs @ integers.T).float()
    got = packed.dense_packed_linear(x, *stored, None, sizes, name)
    # One group is one exact sum, scaled; several are added in float.
    torch.testing.assert_close(got, want, rtol=0, atol=0 if depth <= group else 1e-6 * want.abs().max().item())


@each_format
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("depth", [516, 517, 5000, 70_001])
def test_the_largest_sum_does_not_overflow(name, depth, rows):
    x = torch.full((rows, depth), 0.7)
    y = packed.dense_packed_linear(*one_block(name, x, torch.full((3, depth), 0.9)))
    assert_close(y / depth, torch.full((rows, 3), 0.63))


@each_format
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 3e-41, TINY, 1e-36, 1e-30, 1e30, 3e38])
def test_any_magnitude(name, value, rows):
    x, weight = torch.randn(rows, 33).clamp(-1, 1) * value, torch.randn(5, 33) / 33
    want = x.double() @ weight.double().T
    # Rounding of the weights and of the inputs, whose steps are never smaller than the smallest normal number.
    known, largest = FORMATS[name], weight.abs().max().item()
    bound = known.error_bound(weight, BlockGrid(5, 33, 34)).double() + largest / 10_000
    allowed = x.double().abs() @ bound.T + TINY * 33
    if known.steps == 255:
        levels = (x.amax(1, keepdim=True).clamp_min(0) - x.amin(1, keepdim=True).clamp_max(0)).double() / 509
        allowed += levels * (weight.abs().sum(1) + 33 * bound.max())
    y = packed.dense_packed_linear(*one_block(name, x, weight))
    assert ((y - want).abs() <= allowed).all()
    assert_close(y, reference.dense_packed_linear(*one_block(name, x, weight)))


@each_format
@needs_kernels
@pytest.mark.parametrize("value", [0.0, 1e-45, 6.4e-41, 1e-38, 1e-35, 1e-30, 1.0, 1e30])
def test_inputs_are_rounded_as_in_the_reference(name, value):
    x = torch.randn(9, 33).clamp(-1, 1) * value
    x[:, 0] = value
    y = packed.dense_packed_linear(*one_block(name, x, 127 * torch.eye(33)))
    torch.testing.assert_close(y, 127 * FORMATS[name].round_inputs(x, BlockGrid(33, 33, 34)), rtol=1e-6, atol=0)


@each_format
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize("suffix", ["", "_reference"])
def test_a_bad_input_spoils_its_row_alone(name, bad, rows, suffix):
    product = getattr(torch.ops.blockgate, "dense_packed_linear" + suffix)
    x = torch.randn(rows, 40)
    stored = packed.pack_blocks(torch.randn(19, 40), (8, 16), name)
    good = product(x, *stored, None, (19, 40, 8, 16), name)
    x[rows // 2, 38] = bad
    y = product(x, *stored, None, (19, 40, 8, 16), name)
    assert y[rows // 2].isnan().all()
    others = [row for row in range(rows) if row != rows // 2]
    torch.testing.assert_close(y[others], good[others], rtol=0, atol=0)


@each_format
@pytest.mark.parametrize(("m", "n", "block"), [(256, 128, 128), (200, 1536, 128), (64, 2000, 2000), (40, 4096, 4096)])
def test_rounding_the_inputs_costs_at_most_a_percent_of_the_error(name, m, n, block):
    weight, x = torch.randn(m, n), torch.randn(64, n)
    want = x.double() @ weight.double().T
    stored = packed.pack_blocks(weight, (block, block), name)
    kept = x.double() @ packed.unpack_blocks(*stored, (m, n, block, block), name).double().T
    got = packed.dense_packed_linear(x, *stored, None, (m, n, block, block), name)
    # Inputs in 8 bits are off by about as much as weights in 8 bits.
    assert (got - want).norm() < (2 if name == "int8a8" else 1.01) * (kept - want).norm()


@each_format
@pytest.mark.parametrize("kind", ["both signs", "positive", "negative", "one far away", "equal"])
def test_rounded_inputs_stay_within_half_a_step(name, kind):
    x = torch.randn(50, 40) * torch.logspace(-30, 30, 50)[:, None]
    if kind in {"positive", "negative"}:
        x = x.abs() if kind == "positive" else -x.abs()
    elif kind == "one far away":
        x[:, 7] *= 1000
    elif kind == "equal":
        x[:] = x[:, :1]
    known = FORMATS[name]
    rounded = known.round_inputs(x, BlockGrid(8, 40, (8, 40))).double()
    half = x.abs().amax(1, keepdim=True).double() / 32767 / 2
    if known.steps == 255:
        half = (x.amax(1, keepdim=True).clamp_min(0) - x.amin(1, keepdim=True).clamp_max(0)).double() / 510
    # And what float32 rounds in the division and in the product with the size of a step.
    assert ((rounded - x).abs() <= half + x.abs().amax(1, keepdim=True) * 2.0**-22).all()
    assert (rounded[x == 0] == 0).all()


def test_inputs_of_int8a8_by_hand():
    known = FORMATS["int8a8"]
    x = torch.tensor([
        [-55.0, 200.0, 0.0, 0.4, 0.6, -0.6],
        [0.0, 510.0, 1.0, 1.1, 3.0, 509.0],
        [-255.0, 0, -1, -2, -3, -4],
    ])
    want = [[-55, 200, 0, 0, 1, -1], [0, 510, 0, 2, 4, 508], [-255, 0, -1, -2, -3, -4]]
    torch.testing.assert_close(known.round_inputs(x, BlockGrid(8, 6, 6)), torch.tensor(want, dtype=torch.float32))


@needs_kernels
def test_a_block_too_deep_for_integer_sums_is_refused():
    depth = (2**31 - 1) // 127 + 1
    blocks, scale = torch.empty(1, 1, (depth + 1) // 2, 32, dtype=torch.int8), torch.empty(1, 16)
    with pytest.raises(RuntimeError, match="expected at most 16909320 inputs in an int8 block, got 16909321"):
        packed.dense_packed_linear(torch.empty(1, depth), blocks, scale, None, (1, depth, 1, depth), "int8")


def test_int8_and_int8a8_load_what_the_other_saved():
    layer, x = nn.Linear(40, 24), torch.randn(9, 40)
    for ours, theirs in (("int8", "int8a8"), ("int8a8", "int8")):
        packed = bg.pack(nn.Linear(40, 24), ours)
        packed.load_state_dict(bg.pack(layer, theirs).state_dict())
        torch.testing.assert_close(packed(x), bg.pack(layer, ours)(x), rtol=0, atol=0)
