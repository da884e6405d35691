"""The Quasi-RNN's recurrence against a loop over time: states, all gradients, odd sizes, tracing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockgate.ops.forget_pool import forget_pool
from tests.helpers import assert_close
from tests.ops import reference


def problem(steps, rows, width, dtype=torch.float32):
    candidate = torch.randn(steps, rows, width, dtype=dtype, requires_grad=True)
    forget = torch.rand(steps, rows, width, dtype=dtype, requires_grad=True)
    return candidate, forget, torch.randn(rows, width, dtype=dtype, requires_grad=True)


def test_three_steps_by_hand():
    z = torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1)
    f = torch.tensor([0.5, 0.0, 0.25]).view(3, 1, 1)
    states = forget_pool(z, f, torch.tensor([[3.0]]))
    assert states.flatten().tolist() == [2.0, 2.0, 3.5]


@given(st.integers(1, 9), st.integers(0, 5), st.integers(1, 2100), st.sampled_from([torch.float32, torch.float64]))
def test_states_and_gradients_equal_the_reference(steps, rows, width, dtype):
    inputs = problem(steps, rows, width, dtype)
    got, want = forget_pool(*inputs), reference.forget_pool(*inputs)
    assert_close(got, want, "states")
    grad = torch.randn_like(want)
    names = ("candidate", "forget", "initial")
    ours, theirs = torch.autograd.grad(got, inputs, grad), torch.autograd.grad(want, inputs, grad)
    for name, a, b in zip(names, ours, theirs, strict=True):
        assert_close(a, b, name)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_gradcheck(backend):
    assert torch.autograd.gradcheck(lambda *i: forget_pool(*i, backend=backend), problem(4, 2, 3, torch.float64))


@pytest.mark.parametrize("suffix", ["", "_reference"])
def test_opcheck(suffix):
    inputs = problem(4, 2, 3)
    torch.library.opcheck(getattr(torch.ops.blockgate, "forget_pool" + suffix), inputs)
    plain = [t.detach() for t in inputs]
    states = reference.forget_pool(*plain)
    op = getattr(torch.ops.blockgate, "forget_pool_backward" + suffix)
    torch.library.opcheck(op, (torch.randn_like(states), *plain, states))


def test_half_precision_and_strides():
    z, f, c = (t.detach() for t in problem(5, 4, 6))
    assert forget_pool(z.bfloat16(), f.bfloat16(), c.bfloat16()).dtype == torch.bfloat16
    assert_close(
        forget_pool(z.transpose(0, 1)[:4, :4].transpose(0, 1), f[:4], c), reference.forget_pool(z[:4], f[:4], c)
    )
