"""The gated product at sizes where kernels change their ways: many rows, all block sizes, one thread and more."""

from __future__ import annotations

import pytest
import torch

from blockgate.grid import BlockGrid
from blockgate.ops import gated_linear
from tests.helpers import assert_close
from tests.ops import reference

# (out, in), block, rows, share of blocks open
CASES = [
    ((384, 200), (128, 64), 2000, 0.3),
    ((300, 520), (256, 256), 33, 0.9),
    ((64, 64), (8, 8), 513, 0.25),
    ((1030, 70), (16, 16), 130, 0.1),
    ((130, 257), (128, 128), 7, 0.5),
    ((48, 1000), (48, 8), 65, 0.5),
    ((515, 3), (100, 2), 40, 1.0),
    ((16, 16), (16, 16), 1, 1.0),
    ((200, 300), (64, 32), 1, 0.4),
    ((256, 128), (32, 32), 6, 0.2),
    # Tall and thin: the narrow panels of 1, 2, 4, 8 and 16 inputs, whole and ragged.
    ((192, 48), (64, 4), 300, 0.4),
    ((200, 47), (64, 4), 20, 0.5),
    ((300, 31), (128, 2), 150, 0.7),
    ((131, 33), (128, 2), 9, 0.3),
    ((256, 64), (128, 8), 140, 1.0),
    ((270, 61), (128, 8), 41, 0.2),
    ((512, 64), (256, 16), 290, 0.6),
    ((530, 37), (256, 16), 20, 0.5),
    ((150, 23), (64, 1), 70, 0.5),
    ((203, 40), (65, 3), 50, 0.5),
    ((203, 40), (100, 7), 50, 0.5),
    ((90, 50), (40, 13), 35, 0.6),
]

# Gates that choose in every row of blocks: the same, but how many of each row are open. Three keep all.
ROW_CASES = [
    ((160, 96), (16, 16), 70, 3),
    ((192, 48), (64, 4), 150, 5),
    ((130, 70), (32, 32), 300, 1),
    ((1040, 256), (16, 16), 40, 2),
    ((160, 90), (16, 16), 70, 6),
    ((270, 61), (128, 8), 300, 8),
    ((530, 37), (256, 16), 20, 3),
]


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def problem(size, block, rows, share):
    grid = BlockGrid(*size, block)
    x = torch.randn(rows, grid.in_features, requires_grad=True)
    weight = torch.randn(size, requires_grad=True)
    bias = torch.randn(grid.out_features, requires_grad=True)
    if isinstance(share, int):
        scores = torch.randn(rows, grid.num_blocks)
        gates, indices = reference.topk_gates(scores, (share, grid.out_blocks), "margin")
        return grid, [x, weight, bias, gates.requires_grad_()], indices
    open_blocks = max(1, round(share * grid.num_blocks))
    # Some kept scores are negative, so that some of the kept gates are closed.
    gates, indices = reference.topk_gates(torch.randn(rows, grid.num_blocks) + 0.5, (open_blocks, 1), "rms")
    return grid, [x, weight, bias, gates.requires_grad_()], indices


@pytest.mark.parametrize(
    "case", CASES + ROW_CASES, ids=lambda c: f"{c[0][0]}x{c[0][1]}-b{c[1][0]}x{c[1][1]}-N{c[2]}-{c[3]}"
)
def test_outputs_and_gradients_equal_the_reference_in_double(case, threads):  # noqa: ARG001
    grid, inputs, indices = problem(*case)
    y = gated_linear(*inputs, indices, grid.block)
    grad = torch.randn_like(y)
    ours = torch.autograd.grad(y, inputs, grad)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    want = gated_linear(*wide, indices, grid.block, backend="reference")
    assert_close(y, want, "y")
    for name, got, expected in zip(
        ["x", "weight", "bias", "gates"], ours, torch.autograd.grad(want, wide, grad.double()), strict=True
    ):
        assert_close(got, expected, name)


@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_gradients_repeat_bit_for_bit(case):
    grid, inputs, indices = problem(*case)
    y = gated_linear(*inputs, indices, grid.block)
    grad = torch.randn_like(y)
    first, second = (torch.autograd.grad(y, inputs, grad, retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES + ROW_CASES, ids=str)
def test_threads_change_no_bit_of_a_gradient(case):
    grid, inputs, indices = problem(*case)
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            y = gated_linear(*inputs, indices, grid.block)
            x, weight, _, gates = torch.autograd.grad(y, inputs, torch.ones_like(y))
            results.append([y, x, weight, gates])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("block", [(64, 4), (128, 2), (128, 8), (20, 3)], ids=str)
def test_other_rows_change_no_bit_of_a_gradient(block):
    grid, (x, weight, bias, gates), indices = problem((200, 47), block, 45, 0.6)

    def gradients(rows):
        inputs = [x[rows], gates[rows]]
        y = gated_linear(inputs[0], weight, bias, inputs[1], indices[rows], grid.block)
        return torch.autograd.grad(y, inputs, torch.ones_like(y))

    for whole, part in zip(gradients(slice(0, 45)), gradients(slice(7, 12)), strict=True):
        torch.testing.assert_close(part, whole[7:12], rtol=0, atol=0)


@pytest.mark.parametrize("case", [ROW_CASES[0], ROW_CASES[4]], ids=str)
def test_the_order_of_the_gates_changes_no_bit(case):
    grid, (x, weight, bias, gates), indices = problem(*case)
    y = gated_linear(x, weight, bias, gates, indices, grid.block)
    order = torch.randperm(indices.shape[1])
    other = gated_linear(x, weight, bias, gates[:, order], indices[:, order], grid.block)
    torch.testing.assert_close(other, y, rtol=0, atol=0)


def test_a_closed_gate_among_all_is_no_part_of_the_result():
    grid, (x, weight, bias, gates), indices = problem((70, 50), (16, 16), 9, 4)
    with torch.no_grad():
        gates[:, 5] = 0
        weight[16:32, 16:32] = float("nan")
    assert torch.isfinite(gated_linear(x, weight, bias, gates, indices, grid.block)).all()


def test_a_row_of_closed_gates_costs_and_changes_nothing():
    grid, (x, weight, bias, gates), indices = problem((70, 50), (16, 16), 9, 0.5)
    with torch.no_grad():
        gates[4] = 0
        weight_with_nan = weight.clone()
        y = gated_linear(x, weight_with_nan.fill_(float("nan")), bias, gates, indices, grid.block)
    torch.testing.assert_close(y[4], bias, rtol=0, atol=0)
    assert not torch.isfinite(y[3]).all()
