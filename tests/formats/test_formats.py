"""Every registered format: names, round trips, the promised error bound at every extreme, bad weights."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockgate.formats import FORMATS, Format, PackedWeight, get_format
from blockgate.grid import BlockGrid
from blockgate.ops.packed_linear import pack_blocks, unpack_blocks
from tests.helpers import raises_blockgate

each_format = pytest.mark.parametrize("name", FORMATS)
dimension = st.integers(1, 80)
# Ordinary weights, and what hurts: equal, zero, one huge among small ones, denormals, neighbours of a rounding edge.
KINDS = ["normal", "equal", "zero", "one huge", "denormal", "tiny", "largest", "steps", "two signs"]


def weights(kind, m, n):
    torch.manual_seed(0)
    weight = torch.randn(m, n)
    if kind == "equal":
        return torch.full((m, n), float(weight[0, 0]))
    if kind == "zero":
        return torch.zeros(m, n)
    if kind == "one huge":
        weight[torch.randint(m, ()), torch.randint(n, ())] = 1e30
    if kind == "denormal":
        return torch.randint(-40, 41, (m, n)) * 1e-45
    if kind == "tiny":
        return weight * torch.finfo(torch.float32).tiny
    if kind == "largest":
        # A little less than the largest number of all, which a rounded scale may turn to inf.
        return weight.clamp(-1, 1) * 3.39e38
    if kind == "steps":
        return torch.randint(-16, 17, (m, n)) / 2
    if kind == "two signs":
        return weight.sign()
    return weight


def test_names_dtypes_and_formats_are_understood():
    for name, known in FORMATS.items():
        assert known.name == name
        assert get_format(name) is known
        assert get_format(known) is known
        assert get_format(copy.deepcopy(known)) is known
        assert pickle.loads(pickle.dumps(known)) is known
    # One dtype, one kind of blocks: a checkpoint can't be taken for another's.
    assert len({(known.dtype, known.bits, known.side_by_side) for known in FORMATS.values()}) == len(FORMATS) - 1
    assert type(FORMATS["int8a8"]).pack is type(FORMATS["int8"]).pack
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8):
        assert get_format(dtype).dtype == dtype


@pytest.mark.parametrize("wanted", ["int7", torch.float64, torch.uint8, None, 4, ["int8"]])
def test_an_unknown_format_is_a_clear_error(wanted):
    with raises_blockgate("format: expected one of 'bfloat16', 'float16', 'float32', 'int"):
        get_format(wanted)


@given(st.sampled_from(sorted(FORMATS)), st.sampled_from(KINDS), dimension, dimension, dimension, dimension)
def test_the_error_stays_within_its_bound(name, kind, m, n, block_out, block_in):
    known, grid, weight = FORMATS[name], BlockGrid(m, n, (block_out, block_in)), weights(kind, m, n)
    back = known.unpack(known.pack(weight, grid), grid)
    bound = known.error_bound(weight, grid)
    assert bound.shape == back.shape == weight.shape
    assert ((back.double() - weight.double()).abs() <= bound.double()).all()
    # A bound that says nothing would hold too. The types of 16 bits end somewhere, float16 also towards 0.
    largest = weight.abs().max().double()
    ends = {torch.bfloat16: (0, 3e38), torch.float16: (2.0**-20, 65504)}.get(known.dtype, (0, torch.inf))
    assert (bound.double() <= largest / 4 + 1e-42).all() or not ends[0] <= largest <= ends[1]


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_kernels_round_ties_to_even(name):
    known, grid = FORMATS[name], BlockGrid(16, 64, (16, 16))
    bits = 9 if name == "bfloat16" else 12
    # Odd numbers of one bit too many lie halfway between two that are stored.
    weight = (2 ** (bits - 1) + 1 + 2 * torch.arange(16 * 64) % 2 ** (bits - 1)).float().view(16, 64)
    blocks, scale = pack_blocks(weight, grid.block, name)
    assert torch.equal(unpack_blocks(blocks, scale, [16, 64, 16, 16], name), weight.to(known.dtype).float())


@given(st.sampled_from(sorted(FORMATS)), st.sampled_from(KINDS), dimension, dimension, dimension, dimension)
def test_kernels_pack_the_bits_of_the_format(name, kind, m, n, block_out, block_in):
    known, grid, weight = FORMATS[name], BlockGrid(m, n, (block_out, block_in)), weights(kind, m, n)
    want, got = known.pack(weight, grid), pack_blocks(weight, grid.block, name)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    sizes = (m, n, *grid.block)
    assert known.shapes(sizes) == (want.blocks.shape, want.scale.shape)
    back = unpack_blocks(*got, sizes, name)
    torch.testing.assert_close(back, known.unpack(PackedWeight(*got), grid), rtol=0, atol=0)


@each_format
def test_what_was_unpacked_packs_to_itself(name):
    known, grid = FORMATS[name], BlockGrid(50, 70, (32, 40))
    once = known.unpack(known.pack(torch.randn(50, 70), grid), grid)
    twice = known.unpack(known.pack(once, grid), grid)
    torch.testing.assert_close(twice, once, rtol=2e-7, atol=0)


@each_format
def test_bits_are_what_the_blocks_take(name):
    known, grid = FORMATS[name], BlockGrid(64, 64, (32, 64))
    blocks = known.pack(torch.randn(64, 64), grid).blocks
    assert blocks.numel() * blocks.element_size() * 8 == known.bits * 64 * 64


@each_format
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_integers_refuse_weights_that_are_not_finite(name, bad):
    known, weight = FORMATS[name], torch.randn(4, 4)
    known.check_weight(weight)
    known.check_weight(weight.to("meta"))
    weight[2, 1] = bad
    if known.dtype.is_floating_point:
        known.check_weight(weight)
        return
    with raises_blockgate(f"weight: expected finite values for {name}, got 'NaN or inf'"):
        known.check_weight(weight)


def test_float16_refuses_what_would_become_inf():
    known, weight = FORMATS["float16"], torch.randn(4, 4)
    # The last number that rounds down to the largest of all.
    weight[0, 0] = torch.nextafter(torch.tensor(65520.0), torch.tensor(0.0))
    known.check_weight(weight)
    weight[3, 1] = -65520
    with raises_blockgate("weight: expected numbers up to 65504 for float16, got '65520'"):
        known.check_weight(weight)


def test_kernels_read_every_float16():
    stored = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    blocks = stored.view(1, 1 << 12, 1, 16)
    ones = torch.ones(1, 1)
    args = (torch.empty(0), None, ones, torch.zeros(1, 1, dtype=torch.int64), [1 << 16, 1, 1 << 16, 1], "float16")
    torch.testing.assert_close(
        torch.ops.blockgate.packed_linear(ones, blocks, *args)[0], stored.float(), rtol=0, atol=0, equal_nan=True
    )


def test_a_file_in_the_folder_is_a_format():
    assert all(isinstance(known, Format) for known in FORMATS.values())
    assert {"float32", "bfloat16", "float16", "int8", "int8a8", "int4"} <= set(FORMATS)


@pytest.mark.parametrize("depth", [1, 31, 32, 33, 64, 65])
def test_int4_scales_belong_to_32_inputs(depth):
    known, grid = FORMATS["int4"], BlockGrid(5, depth, (5, depth))
    weight = torch.randn(5, depth)
    before = known.unpack(known.pack(weight, grid), grid)
    # A huge weight coarsens its own group and no other.
    weight[2, 0] = 1e4
    after = known.unpack(known.pack(weight, grid), grid)
    changed = (before != after).nonzero()
    assert (changed[:, 0] == 2).all()
    assert (changed[:, 1] < 32).all()


def test_int4_is_better_than_the_symmetric_choice():
    known, grid, weight = FORMATS["int4"], BlockGrid(256, 256, 64), torch.randn(256, 256)
    error = (known.unpack(known.pack(weight, grid), grid) - weight).square().mean()
    scale = weight.view(256, -1, 32).abs().amax(-1, keepdim=True) / 7
    plain = (weight.view(256, -1, 32) / scale).round() * scale
    assert error < 0.75 * (plain.view(256, 256) - weight).square().mean()
