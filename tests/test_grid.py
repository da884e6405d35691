from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockgate.grid import BlockGrid, open_blocks
from tests.helpers import raises_blockgate


@pytest.mark.parametrize(
    ("sparsity", "blocks", "expected"),
    [
        (0.7, 10, 3),
        (0.9, 15, 2),  # 1.5 rounds up, though 1 - 0.9 lies below 0.1 in binary
        (0.999, 4, 1),  # at least one
        (0.0, 7, 7),
        (0, 1, 1),
        (0.5, 1, 1),  # halves up
        (0.5, 3, 2),
        (0.9, 576, 58),
        (0.75, 576, 144),
        (0.1, 15, 14),
    ],
)
def test_open_blocks_rounds_to_nearest_halves_up(sparsity, blocks, expected):
    assert open_blocks(sparsity, blocks) == expected


@given(st.integers(0, 200), st.integers(1, 200))
def test_open_blocks_agrees_with_exact_arithmetic(closed_share, blocks):
    if closed_share == 200:
        return
    exact = max(1, ((200 - closed_share) * blocks * 2 + 200) // 400)
    assert open_blocks(closed_share / 200, blocks) == exact


@pytest.mark.parametrize("sparsity", [1, 1.0, -0.1, 1.5, float("nan"), "0.5", None, True])
def test_sparsity_outside_its_range_is_refused(sparsity):
    with raises_blockgate(f"sparsity: expected a number in [0, 1), got {sparsity!r}"):
        open_blocks(sparsity, 4)


@pytest.mark.parametrize(
    ("size", "block", "blocks"),
    [
        ((6, 4), 2, (3, 2)),
        ((7, 5), (3, 2), (3, 3)),  # ragged in both directions
        ((2, 3), 128, (1, 1)),  # smaller than one block
        ((1, 1), 1, (1, 1)),
        ((130, 7), (128, 1), (2, 7)),
    ],
)
def test_grid_counts_blocks(size, block, blocks):
    grid = BlockGrid(*size, block)
    assert (grid.out_blocks, grid.in_blocks) == blocks
    assert grid.num_blocks == blocks[0] * blocks[1]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 50), st.integers(1, 50))
def test_slices_tile_the_weight_exactly_once(out_features, in_features, block_out, block_in):
    grid = BlockGrid(out_features, in_features, (block_out, block_in))
    covered = set()
    for index in range(grid.num_blocks):
        outs, ins = grid.slices(index)
        cells = {(o, i) for o in range(outs.start, outs.stop) for i in range(ins.start, ins.stop)}
        assert cells
        assert not cells & covered
        covered |= cells
    assert len(covered) == out_features * in_features


def test_numpy_integers_are_integers():
    grid = BlockGrid(np.int64(6), np.int32(4), np.int64(2))
    assert grid == BlockGrid(6, 4, 2)
    assert type(grid.in_features) is int


@pytest.mark.parametrize("blocks", [0, -3, 2.5, True, None])
def test_open_blocks_counts_whole_blocks(blocks):
    with raises_blockgate(f"num_blocks: expected a positive int, got {blocks!r}"):
        open_blocks(0.5, blocks)


def test_grid_is_a_value():
    assert BlockGrid(6, 4, 2) == BlockGrid(6, 4, (2, 2))
    assert len({BlockGrid(6, 4, 2), BlockGrid(6, 4, (2, 2))}) == 1
    assert repr(BlockGrid(6, 4, 2)) == "BlockGrid(out_features=6, in_features=4, block=(2, 2))"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 2), "out_features: expected a positive int, got 0"),
        ((4, -1, 2), "in_features: expected a positive int, got -1"),
        ((4, 4, 0), "block_size (out): expected a positive int, got 0"),
        ((4, 4, (2, -3)), "block_size (in): expected a positive int, got -3"),
        ((4.0, 4, 2), "out_features: expected a positive int, got 4.0"),
        ((4, True, 2), "in_features: expected a positive int, got True"),
        ((4, 4, 2.0), "block_size (out): expected a positive int, got 2.0"),
        ((4, 4, None), "block_size (out): expected a positive int, got None"),
        ((4, 4, (1, 2, 3)), "block_size: expected one int or (out, in), got (1, 2, 3)"),
    ],
)
def test_bad_sizes_are_refused(arguments, message):
    with raises_blockgate(message, ValueError):
        BlockGrid(*arguments)
