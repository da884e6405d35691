"""The gated LSTM's recurrence against a loop over time: outputs, all gradients, tracing."""

from __future__ import annotations

import pytest
import torch

from blockgate.ops import gate_scores, gated_linear, topk_gates
from blockgate.ops.gated_lstm import gated_lstm
from tests.helpers import assert_close, raises_blockgate
from tests.ops.lstm_problems import CASES, NAMES, Case, named_gradients, problem

BACKENDS = ["auto", "reference"]


def step_by_step(tensors, options, backend="reference"):
    """The same through the separate ops, one step after the other: what autograd makes of them is right."""
    projected, h, c, weight, bias, gate_weight, gate_bias, hidden_weight, hidden_bias = tensors
    columns = slice(options["key_offset"], options["key_offset"] + options["key_size"])
    outputs = []
    for projected_t in projected:
        key = h[:, columns]
        if hidden_weight is not None:
            key = torch.relu(gate_scores(key, hidden_weight, hidden_bias, backend=backend))
        scores = gate_scores(key, gate_weight, gate_bias, backend=backend)
        gates, indices = topk_gates(
            scores,
            options["open_blocks"],
            groups=options["groups"],
            normalise=options["normalise"],
            backend=backend,
        )
        pre = projected_t + gated_linear(h, weight, bias, gates, indices, options["block"], backend=backend)
        i, f, g, o = pre.chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    return torch.stack(outputs), c


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_all_gradients_equal_the_loop_over_separate_ops(case, backend, dtype):
    tensors, options = problem(case, dtype)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    want = step_by_step(wide, options)
    got = gated_lstm(*tensors, **options, backend=backend)
    for name, ours, theirs in zip(("output", "c_n"), got, want, strict=True):
        assert_close(ours, theirs, name)
    grads = [torch.randn_like(w) for w in want]
    expected = named_gradients(want, wide, grads)
    for name, ours in named_gradients(got, tensors, [g.to(dtype) for g in grads]).items():
        assert_close(ours, expected[name], name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case",
    [
        Case(3, 2, 6, (4, 3), 0.6, (1, 4), 5),
        Case(3, 2, 5, (5, 2), 0.5, normalise="rms"),
        Case(3, 2, 6, (3, 2), 0.5, normalise="margin"),
    ],
)
def test_gradcheck(case, backend):
    tensors, options = problem(case, torch.float64)
    present = [t for t in tensors if t is not None]

    def run(*changed):
        rest = iter(changed)
        return gated_lstm(*(None if t is None else next(rest) for t in tensors), **options, backend=backend)

    assert torch.autograd.gradcheck(run, present)


@pytest.mark.parametrize("suffix", ["", "_reference"])
@pytest.mark.parametrize("hidden", [None, 3])
def test_opcheck(suffix, hidden):
    tensors, options = problem(Case(3, 2, 6, (4, 3), key=(1, 4), hidden=hidden))
    block = options.pop("block")
    key = [options["key_offset"], options["key_size"]]
    plain = [key, [*block], [options["open_blocks"], 1], "mean"]
    op = getattr(torch.ops.blockgate, "gated_lstm" + suffix)
    torch.library.opcheck(op, (*tensors, *plain))
    tensors = [None if t is None else t.detach() for t in tensors]
    output, c_n, *saved = op(*tensors, *plain)
    backward = getattr(torch.ops.blockgate, "gated_lstm_backward" + suffix)
    weights = [tensors[3], tensors[5], tensors[7], tensors[1], tensors[2]]
    for grads in ((torch.randn_like(output), None), (None, torch.randn_like(c_n))):
        arguments = (*weights, output, *saved, *grads, *plain, grads[1] is None)
        torch.library.opcheck(backward, arguments)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("used", [(0,), (1,)])
def test_a_result_that_nobody_uses_needs_no_gradient(used, backend):
    tensors, options = problem(CASES[0])
    want, got = step_by_step(tensors, options), gated_lstm(*tensors, **options, backend=backend)
    grads = [torch.randn_like(want[i]) for i in used]
    expected = named_gradients([want[i] for i in used], tensors, grads)
    for name, ours in named_gradients([got[i] for i in used], tensors, grads).items():
        assert_close(ours, expected[name], name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_asked_gradients_come(backend):
    tensors, options = problem(CASES[0])
    tensors = [t if t is None or name == "gate_weight" else t.detach() for name, t in zip(NAMES, tensors, strict=True)]
    output, _ = gated_lstm(*tensors, **options, backend=backend)
    output.sum().backward()
    assert tensors[5].grad is not None
    assert all(t is None or t is tensors[5] or t.grad is None for t in tensors)


def test_the_second_derivative_is_refused():
    tensors, options = problem(CASES[0])
    output, _ = gated_lstm(*tensors, **options)
    (grad,) = torch.autograd.grad(output.sum(), tensors[3], create_graph=True)
    with raises_blockgate("expected to be differentiated once"):
        grad.sum().backward()
