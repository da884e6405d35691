from __future__ import annotations

import math

import pytest
import torch

from blockgate.convert.closeness import relative_difference
from tests.helpers import raises_blockgate


@pytest.mark.parametrize(
    ("after", "before", "expected"),
    [
        ([[3.0, 4.0]], [[3.0, 4.0]], 0.0),
        ([[3.0, 4.5]], [[3.0, 4.0]], 0.1),
        ([[3.0], [4.5]], [[3.0], [4.0]], 0.1),
        ([[0.0]], [[0.0]], 0.0),
        ([[1.0]], [[0.0]], math.inf),
        ([[math.nan]], [[1.0]], math.nan),
    ],
)
def test_the_difference_counts_over_all_tensors(after, before, expected):
    difference = relative_difference([torch.tensor(a) for a in after], [torch.tensor(b) for b in before])
    assert difference == pytest.approx(expected, nan_ok=True)


def test_other_shapes_are_refused():
    with raises_blockgate("example_input: expected outputs of the same shapes, [(2,)], got [(3,)]"):
        relative_difference([torch.ones(3)], [torch.ones(2)])
