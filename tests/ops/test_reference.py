"""The judge itself is judged: by hand-computed cases and by the formula as the paper prints it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from blockgate.grid import BlockGrid
from tests.helpers import assert_close, dense_mask_linear, expand, gradients, raises_blockgate
from tests.ops import reference

RULES = ("mean", "rms", "none", "margin", "margin_near_dense")


def test_two_by_two_grid_by_hand():
    scores = torch.tensor([[4.0, -1.0, 2.0, 3.0]])
    gates, indices = reference.topk_gates(scores, (2, 1), "mean")
    assert indices.tolist() == [[0, 3]]
    assert_close(gates, torch.tensor([[4 * 4 / 7, 3 * 4 / 7]]))
    # W = [[1, 2], [3, 4]] with blocks of 1: y0 = g0 * 1 * x0, y1 = g3 * 4 * x1
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    y = reference.gated_linear(torch.tensor([[10.0, 100.0]]), weight, torch.tensor([0.5, -0.5]), gates, indices, (1, 1))
    assert_close(y, torch.tensor([[16 / 7 * 10 + 0.5, 12 / 7 * 400 - 0.5]]))


def test_normalisation_by_hand():
    scores = torch.tensor([[3.0, 4.0, -5.0, 1.0]])
    for normalise, expected in {"mean": [12 / 7, 16 / 7], "rms": [3 / 2.5, 4 / 2.5], "none": [3.0, 4.0]}.items():
        gates, _ = reference.topk_gates(scores, (2, 1), normalise)
        assert_close(gates, torch.tensor([expected]), normalise)


def test_per_row_keeps_as_many_in_every_group():
    scores = torch.tensor([[9.0, 8.0, 7.0, 0.1, 0.3, 0.2]])
    gates, indices = reference.topk_gates(scores, (1, 2), "none")
    assert indices.tolist() == [[0, 4]]
    assert_close(gates, torch.tensor([[9.0, 0.3]]))


def test_ties_go_to_the_lowest_index():
    _, indices = reference.topk_gates(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]), (2, 1), "mean")
    assert indices.tolist() == [[1, 2]]


def test_scores_that_relu_closes_stay_closed():
    gates, indices = reference.topk_gates(torch.tensor([[-1.0, 5.0, -2.0]]), (2, 1), "mean")
    assert indices.tolist() == [[0, 1]]
    assert gates[0, 0] == 0
    assert_close(gates, torch.tensor([[0.0, 3.0]]))


def test_margins_by_hand():
    scores = torch.tensor([[0.5, -1.0, 2.0, -3.0]], dtype=torch.float64)
    gates, indices = reference.topk_gates(scores, (2, 1), "margin")
    assert indices.tolist() == [[0, 2]]
    values = torch.tensor([[1.501, 3.001]], dtype=torch.float64)  # above -1, and the floor
    assert_close(gates, values / (values.square().sum() / 4).sqrt())
    # All open: the lowest value is an average step, 5 / 4, and the floor.
    gates, indices = reference.topk_gates(scores, (4, 1), "margin")
    values = torch.tensor([[4.751, 3.251, 6.251, 1.251]], dtype=torch.float64)
    assert_close(gates, values / values.square().mean().sqrt())


def test_margins_near_a_dense_layer_by_hand():
    scores = torch.tensor([[0.5, -1.0, 2.0, -3.0]], dtype=torch.float64)
    for open_blocks, kept in {2: [1.625, 3.125], 4: [4.5, 3.0, 6.0, 1.0]}.items():  # the floors are 1 / 8 and 1
        gates, _ = reference.topk_gates(scores, (open_blocks, 1), "margin_near_dense")
        values = torch.tensor([kept], dtype=torch.float64)
        assert_close(gates, values / (values.square().sum() / 4).sqrt())


def test_margins_do_not_see_what_all_scores_share():
    scores = torch.randn(5, 12, dtype=torch.float64)
    for open_blocks in (1, 3, 6):
        want, chosen = reference.topk_gates(scores, (open_blocks, 2), "margin")
        gates, indices = reference.topk_gates(scores - 100, (open_blocks, 2), "margin")
        torch.testing.assert_close(indices, chosen)
        assert_close(gates, want)
    equal, _ = reference.topk_gates(torch.full((1, 6), -2.0), (2, 1), "margin")
    assert_close(equal, torch.full((1, 2), 3**0.5))


@torch.no_grad()
def test_no_positive_score_closes_everything_without_nan():
    for normalise in ("mean", "rms", "none"):
        scores = torch.tensor([[-1.0, 0.0, -2.0]], requires_grad=True)
        with torch.enable_grad():
            gates, _ = reference.topk_gates(scores, (2, 1), normalise)
            gates.sum().backward()
        assert gates.tolist() == [[0.0, 0.0]]
        assert scores.grad.tolist() == [[0.0, 0.0, 0.0]]


sizes = st.integers(1, 12)


@given(sizes, sizes, sizes, sizes, st.integers(0, 5), st.floats(0, 0.99), st.booleans())
def test_product_and_gradients_equal_the_dense_mask_formula(m, n, block_out, block_in, rows, sparsity, with_bias):
    grid = BlockGrid(m, n, (block_out, block_in))
    open_blocks = max(1, round((1 - sparsity) * grid.num_blocks))
    x = torch.randn(rows, n, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(m, n, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(m, dtype=torch.float64, requires_grad=True) if with_bias else None
    scores = torch.randn(rows, grid.num_blocks, dtype=torch.float64)
    gates, indices = reference.topk_gates(scores, (open_blocks, 1), "rms")
    gates.requires_grad_()

    y = reference.gated_linear(x, weight, bias, gates, indices, grid.block)
    expected = dense_mask_linear(x, weight, bias, expand(gates, indices, grid), grid)
    assert_close(y, expected, "y")

    inputs = [t for t in (x, weight, bias, gates) if t is not None]
    grad = torch.randn_like(y)
    wanted = gradients(expected, inputs, grad)
    written = dict(zip(["x", "weight", "gates"], _written_backward(grad, x, weight, gates, indices, grid), strict=True))
    derived = gradients(y, inputs, grad)
    for tensor, want, got in zip(inputs, wanted, derived, strict=True):
        # A closed gate gets no gradient, though the formula has one there.
        assert_close(got, torch.where(gates == 0, 0, want) if tensor is gates else want)
    assert_close(written["x"], derived[0], "x")
    assert_close(written["weight"], derived[1], "weight")
    assert_close(written["gates"], derived[-1], "gates")


def _written_backward(grad, x, weight, gates, indices, grid):
    with torch.no_grad():
        return reference.gated_linear_backward(grad, x, weight, gates, indices, grid.block, True, True, True)


@given(st.integers(0, 4), st.integers(1, 4), st.integers(1, 6), st.sampled_from(RULES))
def test_written_gate_gradient_equals_autograd(rows, groups, group_size, normalise):
    scores = torch.randn(rows, groups * group_size, dtype=torch.float64, requires_grad=True)
    selection = ((group_size + 1) // 2, groups)
    gates, indices = reference.topk_gates(scores, selection, normalise)
    grad = torch.randn_like(gates)
    (derived,) = torch.autograd.grad(gates, scores, grad)
    written = reference.topk_gates_backward(grad, scores, gates, indices, selection, normalise)
    assert_close(written.detach(), derived)


def test_memory_grows_with_the_output_not_with_the_weights():
    # Every row's own gated weight would take 512 * 256 * 256 * 4 bytes = 134 MB.
    rows, size = 512, 256
    x, weight = torch.randn(rows, size), torch.randn(size, size)
    gates, indices = reference.topk_gates(torch.rand(rows, 64) + 0.1, (32, 1), "mean")
    with torch.profiler.profile(profile_memory=True) as profile:
        reference.gated_linear(x, weight, None, gates, indices, (32, 32))
    largest = max(event.self_cpu_memory_usage / event.count for event in profile.key_averages())
    assert largest <= 2 * rows * size * 4


def test_bad_index_is_refused():
    x, weight, gates = torch.ones(1, 4), torch.ones(4, 4), torch.ones(1, 1)
    for index in (-1, 4):
        with raises_blockgate("block indices: expected values from 0 to 3", ValueError):
            reference.gated_linear(x, weight, None, gates, torch.tensor([[index]]), (2, 2))
