"""The recurrences of gated LSTMs and GRUs against a loop over time: outputs, all gradients, tracing."""

from __future__ import annotations

import pytest
import torch

from blockgate.ops import gate_scores, gated_linear, topk_gates
from tests.helpers import assert_close, raises_blockgate
from tests.ops.recurrent_problems import CASES, EACH_CELL, Case, named_gradients, problem

BACKENDS = ["auto", "reference"]


def step_by_step(cell, tensors, options, backend="reference"):
    """The same through the separate ops, one step after the other: what autograd makes of them is right."""
    projected, *state, weight, bias, gate_weight, gate_bias, hidden_weight, hidden_bias = tensors
    columns = slice(options["key_offset"], options["key_offset"] + options["key_size"])
    outputs = []
    for projected_t in projected:
        key = state[0][:, columns]
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
        product = gated_linear(state[0], weight, bias, gates, indices, options["block"], backend=backend)
        state = cell.step(projected_t, product, state)
        outputs.append(state[0])
    return torch.stack(outputs), *state[1:]


@EACH_CELL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_all_gradients_equal_the_loop_over_separate_ops(case, backend, dtype, cell):
    tensors, options = problem(case, dtype, cell)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    want = step_by_step(cell, wide, options)
    got = cell.run(*tensors, **options, backend=backend)
    for ours, theirs in zip(got, want, strict=True):
        assert_close(ours, theirs)
    grads = [torch.randn_like(w) for w in want]
    expected = named_gradients(want, wide, grads)
    for name, ours in named_gradients(got, tensors, [g.to(dtype) for g in grads]).items():
        assert_close(ours, expected[name], name)


@EACH_CELL
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case",
    [
        Case(3, 2, 6, (4, 3), 0.6, (1, 4), 5),
        Case(3, 2, 5, (5, 2), 0.5, normalise="rms"),
        Case(3, 2, 6, (3, 2), 0.5, normalise="margin"),
    ],
)
def test_gradcheck(case, backend, cell):
    tensors, options = problem(case, torch.float64, cell)
    present = [t for t in tensors if t is not None]

    def run(*changed):
        rest = iter(changed)
        return cell.run(*(None if t is None else next(rest) for t in tensors), **options, backend=backend)

    assert torch.autograd.gradcheck(run, present)


@EACH_CELL
@pytest.mark.parametrize("suffix", ["", "_reference"])
@pytest.mark.parametrize("hidden", [None, 3])
def test_opcheck(suffix, hidden, cell):
    tensors, options = problem(Case(3, 2, 6, (4, 3), key=(1, 4), hidden=hidden), cell=cell)
    block = options.pop("block")
    key = [options["key_offset"], options["key_size"]]
    plain = [key, [*block], [options["open_blocks"], 1], "mean"]
    op = getattr(torch.ops.blockgate, cell.name + suffix)
    torch.library.opcheck(op, (*tensors, *plain))
    _, *state, weight, _, gate_weight, _, hidden_weight, _ = [None if t is None else t.detach() for t in tensors]
    output, *saved = op(*(None if t is None else t.detach() for t in tensors), *plain)
    backward = getattr(torch.ops.blockgate, f"{cell.name}_backward{suffix}")
    last = saved[: cell.states - 1]
    for used in range(1 + len(last)):
        grads = [torch.randn_like(t) if i == used else None for i, t in enumerate((output, *last))]
        saved_by_step = saved[len(last) :]
        arguments = (weight, gate_weight, hidden_weight, *state, output, *saved_by_step, *grads, *plain, used == 0)
        torch.library.opcheck(backward, arguments)


@EACH_CELL
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_result_that_nobody_uses_needs_no_gradient(backend, cell):
    tensors, options = problem(CASES[0], cell=cell)
    wanted, found = step_by_step(cell, tensors, options), cell.run(*tensors, **options, backend=backend)
    assert len(found) == cell.states
    for got, want in zip(found, wanted, strict=True):
        grad = torch.randn_like(want)
        expected = named_gradients(want, tensors, grad)
        for name, ours in named_gradients(got, tensors, grad).items():
            assert_close(ours, expected[name], name)


@EACH_CELL
@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_asked_gradients_come(backend, cell):
    tensors, options = problem(CASES[0], cell=cell)
    named = zip(cell.names, tensors, strict=True)
    tensors = [t if t is None or name == "gate_weight" else t.detach() for name, t in named]
    output, *_ = cell.run(*tensors, **options, backend=backend)
    output.sum().backward()
    asked = tensors[cell.names.index("gate_weight")]
    assert asked.grad is not None
    assert all(t is None or t is asked or t.grad is None for t in tensors)


@EACH_CELL
def test_the_second_derivative_is_refused(cell):
    tensors, options = problem(CASES[0], cell=cell)
    output, *_ = cell.run(*tensors, **options)
    (grad,) = torch.autograd.grad(output.sum(), tensors[cell.names.index("weight")], create_graph=True)
    with raises_blockgate("expected to be differentiated once"):
        grad.sum().backward()
