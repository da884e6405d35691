"""Patterns of blocks, against what is counted by hand."""

from __future__ import annotations

import pytest
import torch

from blockgate.gates.magnitude import block_mean_square
from blockgate.grid import BlockGrid, open_blocks
from blockgate.lab.baselines.patterns import (
    even_pattern,
    expand_blocks,
    found_pattern,
    random_pattern,
)


def test_a_square_grid_gets_its_diagonal():
    assert torch.equal(even_pattern(BlockGrid(8, 8, 2), 0.75), torch.eye(4, dtype=torch.bool))


def test_half_of_a_grid_goes_on_where_the_last_row_stopped():
    expected = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 1, 1], [0, 0, 0]]).bool()
    expected[1] = torch.tensor([0, 0, 1])
    expected[2] = torch.tensor([1, 1, 0])
    expected[3] = torch.tensor([0, 0, 1])
    assert torch.equal(even_pattern(BlockGrid(8, 6, 2), 0.5), expected)


@pytest.mark.parametrize("sizes", [(8, 8), (32, 4), (5, 7), (3, 16), (48, 12)])
@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 0.75, 0.9, 0.99])
def test_rows_and_columns_have_their_share(sizes, sparsity):
    pattern = even_pattern(BlockGrid(*sizes, 1), sparsity)
    assert pattern.sum() == open_blocks(sparsity, sizes[0] * sizes[1])
    for dim in (0, 1):
        counts = pattern.sum(dim=dim)
        assert counts.max() - counts.min() <= 1


def test_mean_squares_of_blocks_with_ragged_edges():
    weight = torch.tensor([[1.0, 1, 3], [1, 1, 0], [2, 0, 5]])
    expected = torch.tensor([[1.0, 4.5], [2.0, 25.0]], dtype=torch.float64)
    torch.testing.assert_close(block_mean_square(weight, BlockGrid(3, 3, 2)), expected)


def test_expanding_and_finding_are_inverse():
    grid = BlockGrid(5, 7, (2, 3))
    pattern = even_pattern(grid, 0.5)
    mask = expand_blocks(pattern, grid)
    assert mask.shape == (5, 7)
    assert mask[4, 6] == pattern[2, 2]
    assert torch.equal(found_pattern(mask.float() * torch.randn(5, 7), grid), pattern)


def test_a_random_pattern_opens_as_many_in_every_row_and_others_each_time():
    grid = BlockGrid(40, 60, (4, 3))
    patterns = [random_pattern(grid, 0.75) for _ in range(2)]
    for pattern in patterns:
        assert pattern.shape == (10, 20)
        assert (pattern.sum(1) == 5).all()
    assert not torch.equal(*patterns)
