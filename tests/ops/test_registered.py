"""The registered ops, whatever kernel runs them, against the reference: outputs, gradients, tracing, bad input."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockgate.grid import BlockGrid
from blockgate.ops import gate_scores, gated_linear, topk_gates
from blockgate.ops.topk_gates.reference import average, runner_up
from tests.helpers import assert_close, gradients
from tests.ops import reference

BACKENDS = ["auto", "reference"]
dimension = st.integers(1, 40)


@st.composite
def problems(draw):
    """A gated product with ragged, rectangular blocks, any batch, and some closed gates among the kept ones."""
    grid = BlockGrid(draw(dimension), draw(dimension), (draw(dimension), draw(dimension)))
    rows = draw(st.integers(0, 20))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    open_blocks = draw(st.integers(1, grid.num_blocks))
    x = torch.randn(rows, grid.in_features, dtype=dtype)
    weight = torch.randn(grid.out_features, grid.in_features, dtype=dtype)
    bias = torch.randn(grid.out_features, dtype=dtype) if draw(st.booleans()) else None
    gates, indices = reference.topk_gates(
        torch.randn(rows, grid.num_blocks, dtype=dtype), (open_blocks, 1), draw(st.sampled_from(["mean", "rms"]))
    )
    return grid, x, weight, bias, gates, indices


@given(problems())
def test_gated_linear_and_all_gradients_equal_the_reference(problem):
    grid, *tensors, indices = problem
    x, weight, bias, gates = (None if t is None else t.requires_grad_() for t in tensors)
    inputs = {"x": x, "weight": weight, "gates": gates, "bias": bias}
    inputs = {name: t for name, t in inputs.items() if t is not None}
    y = gated_linear(x, weight, bias, gates, indices, grid.block)
    want = reference.gated_linear(x, weight, bias, gates, indices, grid.block)
    assert_close(y, want, "y")
    grad = torch.randn_like(y)
    ours = torch.autograd.grad(y, list(inputs.values()), grad)
    theirs = gradients(want, list(inputs.values()), grad)
    for name, got, expected in zip(inputs, ours, theirs, strict=True):
        assert_close(got, expected, name)


RULES = ("mean", "rms", "none", "margin", "margin_near_dense")


@given(
    st.integers(0, 9),
    st.integers(1, 5),
    st.one_of(st.integers(1, 40), st.sampled_from([64, 65, 150])),
    st.floats(0.01, 1),
    st.sampled_from(RULES),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
)
def test_topk_gates_and_gradient_equal_the_reference(rows, groups, group_size, share, normalise, dtype, ties):
    open_blocks = max(1, round(share * group_size))
    scores = torch.randn(rows, groups * group_size, dtype=dtype)
    if ties:
        scores = scores.round()
    ours, theirs = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    gates, indices = topk_gates(ours, open_blocks, groups=groups, normalise=normalise)
    want_gates, want_indices = reference.topk_gates(theirs, (open_blocks, groups), normalise)
    torch.testing.assert_close(indices, want_indices)
    assert_close(gates, want_gates, "gates")
    grad = torch.randn_like(gates)
    gates.backward(grad)
    want_gates.backward(grad)
    # Terms of this size cancel where scores nearly tie: what is left of them is rounding.
    unit = divisor(scores, indices, (open_blocks, groups), normalise).clamp(max=1)
    assert_close(unit * ours.grad, unit * theirs.grad, "scores")


def divisor(scores, indices, selection, normalise):
    """What the kept scores of each row, or their distances to the runner-up, were divided by, (N, 1)."""
    open_blocks, groups = selection
    values = scores.gather(1, indices)
    if normalise.startswith("margin"):
        by_group = scores.unflatten(1, (groups, -1))
        order = by_group.sort(dim=-1, descending=True, stable=True).indices
        values = values.unflatten(1, (groups, -1)) - runner_up(by_group, order, open_blocks, normalise)
        values = values.flatten(1)
    else:
        values = values.relu()
    return average(values, scores.shape[1], normalise)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_score_is_kept_and_spoils_its_gates(value, backend):
    gates, indices = topk_gates(torch.tensor([[1.0, 2.0, value]]), 2, backend=backend)
    assert indices.tolist() == [[1, 2]]
    assert gates[0, 1].isnan()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [3, 20, 40])
@pytest.mark.parametrize("open_blocks", [2, 3])
def test_a_bad_score_spoils_the_margins_of_its_row(open_blocks, size, backend):
    scores = torch.randn(2, size)
    scores[0, 1] = float("nan")
    gates, indices = topk_gates(scores, open_blocks, normalise="margin", backend=backend)
    assert 1 in indices[0]
    assert gates[0].isnan().all()
    assert gates[1].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("normalise", ["mean", "rms"])
@pytest.mark.parametrize("scale", [1e-30, 1e-19, 1.0, 1e19, 1e37])
def test_gates_do_not_depend_on_the_scale_of_the_scores(scale, normalise, backend):
    scores = torch.tensor([[1.0, 2.0, 3.0, 4.0, -1.0]])
    gates, _ = topk_gates(scores * scale, 3, normalise=normalise, backend=backend)
    assert_close(gates, topk_gates(scores, 3, normalise=normalise, backend="reference")[0])


@given(st.integers(0, 20), st.integers(1, 70), st.integers(1, 70), st.booleans())
def test_gate_scores_and_gradients_equal_nn_linear(rows, key_size, num_scores, with_bias):
    linear = torch.nn.Linear(key_size, num_scores, bias=with_bias)
    key = torch.randn(rows, key_size, requires_grad=True)
    want = linear(key)
    got = gate_scores(key, linear.weight, linear.bias)
    assert_close(got, want, "scores")
    grad = torch.randn_like(want)
    inputs = (key, *linear.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(got, inputs, grad), torch.autograd.grad(want, inputs, grad), strict=True
    ):
        assert_close(ours, theirs)


def small_problem(dtype=torch.float64):
    x = torch.randn(3, 5, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 5, dtype=dtype, requires_grad=True)
    bias = torch.randn(4, dtype=dtype, requires_grad=True)
    scores = (torch.randn(3, 6, dtype=dtype)).requires_grad_()
    return x, weight, bias, scores


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("normalise", RULES)
@pytest.mark.parametrize(("groups", "open_blocks"), [(1, 4), (2, 2), (2, 3)])
def test_gradcheck_through_selection_and_product(backend, normalise, groups, open_blocks):
    def layer(x, weight, bias, scores):
        gates, indices = topk_gates(scores, open_blocks, groups=groups, normalise=normalise, backend=backend)
        return gated_linear(x, weight, bias, gates, indices, (2, 2), backend=backend)

    assert torch.autograd.gradcheck(layer, small_problem())


@pytest.mark.parametrize("suffix", ["", "_reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opcheck(suffix, dtype):
    x, weight, bias, scores = small_problem(dtype)
    gates, indices = reference.topk_gates(scores.detach(), (3, 1), "mean")
    gates.requires_grad_()
    ops = torch.ops.blockgate
    checks = {
        "gate_scores": (x, weight, bias),
        "topk_gates": (scores, [3, 1], "rms"),
        "topk_gates_backward": (
            torch.randn(3, 3, dtype=dtype),
            scores.detach(),
            gates.detach(),
            indices,
            (3, 1),
            "rms",
        ),
        "gated_linear": (x, weight, bias, gates, indices, [2, 2]),
        "gated_linear_backward": (
            torch.randn(3, 4, dtype=dtype),
            *(t.detach() for t in (x, weight, gates)),
            indices,
            [2, 2],
            True,
            False,
            True,
        ),
    }
    for name, arguments in checks.items():
        torch.library.opcheck(getattr(ops, name + suffix), arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_asked_gradients_come(backend):
    x, weight, bias, scores = small_problem()
    gates, indices = topk_gates(scores.detach(), 3)
    y = gated_linear(x.detach(), weight, bias.detach(), gates, indices, (2, 2), backend=backend)
    y.sum().backward()
    assert weight.grad is not None
    assert x.grad is None
    assert bias.grad is None


def test_non_contiguous_inputs():
    x = torch.randn(5, 6)[:, ::2].T.contiguous().T
    weight = torch.randn(3, 8).T
    gates, indices = topk_gates(torch.rand(5, 8).T.contiguous().T + 0.1, 3)
    got = gated_linear(x, weight, None, gates, indices, (2, 2))
    assert_close(got, reference.gated_linear(x, weight, None, gates, indices, (2, 2)))
    wide = torch.randn(5, 40)[:, 7:17]
    assert_close(gate_scores(wide, torch.ones(3, 10), None), wide.sum(-1, keepdim=True).expand(5, 3))


def test_unsorted_and_repeated_indices_add_up():
    x, weight = torch.randn(2, 4), torch.randn(4, 4)
    gates, indices = torch.rand(2, 3) + 0.1, torch.tensor([[3, 0, 3], [1, 1, 1]])
    assert_close(
        gated_linear(x, weight, None, gates, indices, (2, 2)),
        reference.gated_linear(x, weight, None, gates, indices, (2, 2)),
    )


@pytest.mark.parametrize("index", [-1, 4, 2**40])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bad_index_is_an_error_not_a_crash(index, backend):
    indices = torch.tensor([[0, index]])
    with pytest.raises((ValueError, RuntimeError), match=r"expected.*got"):
        gated_linear(torch.ones(1, 4), torch.ones(4, 4), None, torch.ones(1, 2), indices, (2, 2), backend=backend)


@pytest.mark.usefixtures("nan_filled_memory")
def test_every_cell_of_every_result_is_written():
    grid = BlockGrid(37, 21, (8, 5))
    x = torch.randn(9, 21, requires_grad=True)
    weight = torch.randn(37, 21, requires_grad=True)
    scores = torch.randn(9, grid.num_blocks, requires_grad=True)
    gates, indices = topk_gates(scores, 2)
    y = gated_linear(x, weight, None, gates, indices, grid.block)
    y.sum().backward()
    for tensor in (y, gates, x.grad, weight.grad, scores.grad):
        assert torch.isfinite(tensor).all()
