"""Gated LSTMs against a step-by-step reference made of gated linear layers, and against nn.LSTM."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

import blockgate as bg
from tests.helpers import assert_close

GATED = {"block_size": 4, "sparsity": 0.5, "key_size": None}


def linear_of(matrix):
    """A gated linear layer that shares the parameters of one matrix of an LSTM."""
    linear = bg.DynamicSparseLinear(matrix.grid.in_features, matrix.grid.out_features, block_size=matrix.grid.block)
    linear.weight, linear.bias, linear.gate = matrix.weight, matrix.bias, matrix.gate
    return linear


def step_by_step(lstm, x, hx=None):
    """x (T, N, in) through every layer, one step at a time, straight from the equations."""
    zeros = x.new_zeros(lstm.num_layers, x.shape[1], lstm.hidden_size)
    last = []
    for layer, (h, c) in enumerate(zip(*(hx or (zeros, zeros)), strict=True)):
        from_input, from_state = (linear_of(lstm.matrix(part, f"_l{layer}")) for part in ("ih", "hh"))
        outputs = []
        for x_t in x:
            i, f, g, o = (from_input(x_t) + from_state(h)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        x = torch.stack(outputs)
        last.append((h, c))
    return x, tuple(torch.stack(states) for states in zip(*last, strict=True))


def flat(result):
    y, (h, c) = result
    return (y.data if isinstance(y, torch.nn.utils.rnn.PackedSequence) else y, h, c)


def assert_same(a, b):
    for got, want in zip(flat(a), flat(b), strict=True):
        assert_close(got, want)


CASES = {
    "one layer": {},
    "three layers": {"num_layers": 3},
    "no bias": {"bias": False},
    "per row, rms": {"select": "per_row", "normalise": "rms"},
    "margin": {"gate": "margin"},
    "small key, hidden layer": {"key_size": 3, "key_offset": 1, "gate_hidden": 5},
    "blocks wider than the matrix": {"block_size": 64},
    "rectangular, ragged": {"block_size": (5, 3)},
    "softmax_sum": {"gate": "softmax_sum"},
    "sigmoid": {"gate": "sigmoid", "sparsity": 0.0},
}


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_equations_with_all_gradients(case, backend):
    torch.manual_seed(0)
    lstm = bg.DynamicSparseLSTM(6, 7, **{**GATED, **CASES[case]}, backend=backend, dtype=torch.float64)
    lstm.eval()  # softmax_sum takes the argmax then
    x = torch.randn(5, 3, 6, dtype=torch.float64, requires_grad=True)
    hx = tuple(torch.randn(lstm.num_layers, 3, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    got, want = flat(lstm(x, hx)), flat(step_by_step(lstm, x, hx))
    inputs = (x, *hx, *(p for p in lstm.parameters() if p.requires_grad))
    weights = [torch.randn_like(t) for t in got]
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)
    for a, b in zip(
        torch.autograd.grad(got, inputs, weights, allow_unused=True),
        torch.autograd.grad(want, inputs, weights, allow_unused=True),
        strict=True,
    ):
        assert (a is None) == (b is None)
        if a is not None:
            assert_close(a, b)


@pytest.mark.parametrize("normalise", ["mean", "rms"])
def test_gradcheck(normalise):
    torch.manual_seed(3)
    lstm = bg.DynamicSparseLSTM(
        4, 3, 2, block_size=2, sparsity=0.4, key_size=2, normalise=normalise, dtype=torch.float64
    )
    for gate in (lstm.gate_ih_l0, lstm.gate_hh_l0, lstm.gate_ih_l1, lstm.gate_hh_l1):
        # Far from ties and from the kink of ReLU, where a finite difference means nothing.
        gate.bias.data.copy_(torch.linspace(1.0, 9.0, gate.num_scores))
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    parameters = tuple(lstm.parameters())

    def run(x, *_):
        return flat(lstm(x))

    assert torch.autograd.gradcheck(run, (x, *parameters))


@pytest.mark.parametrize("grad", [True, False])
def test_with_one_open_gate_it_is_nn_lstm(grad):
    """A single block whose gate is open is the dense matrix, whatever its score, because gates average 1."""
    dense = nn.LSTM(6, 7, 2)
    gated = bg.DynamicSparseLSTM.from_dense(dense, block_size=64, sparsity=0.0)
    x, hx = torch.randn(5, 3, 6), (torch.randn(2, 3, 7), torch.randn(2, 3, 7))
    with torch.set_grad_enabled(grad):
        assert_same(gated(x, hx), dense(x, hx))
    assert gated.weight_hh_l1 is dense.weight_hh_l1


LAYOUTS = {
    "time first": (False, (5, 3, 6), (2, 3, 7)),
    "batch first": (True, (3, 5, 6), (2, 3, 7)),
    "unbatched": (False, (5, 6), (2, 7)),
    "unbatched, batch first": (True, (5, 6), (2, 7)),
    "one step": (False, (1, 1, 6), (2, 1, 7)),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shapes_are_those_of_nn_lstm(layout, grad):
    batch_first, shape, state = LAYOUTS[layout]
    dense = nn.LSTM(6, 7, 2, batch_first=batch_first)
    gated = bg.DynamicSparseLSTM.from_dense(dense, block_size=64, sparsity=0.0)
    x, hx = torch.randn(shape), (torch.randn(state), torch.randn(state))
    with torch.set_grad_enabled(grad):
        for state in (None, hx):
            got, want = gated(x, state), dense(x, state)
            assert_same(got, want)
            assert [t.shape for t in flat(got)] == [t.shape for t in flat(want)]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("lengths", [[4, 4, 4], [5, 3, 3, 1], [1, 6, 2]])
@pytest.mark.parametrize("with_state", [True, False])
def test_packed_sequences(lengths, grad, with_state):
    dense = nn.LSTM(6, 7, 2)
    gated = bg.DynamicSparseLSTM.from_dense(dense, block_size=64, sparsity=0.0)
    x = pack_sequence([torch.randn(n, 6) for n in lengths], enforce_sorted=False)
    states = tuple(torch.randn(2, len(lengths), 7) for _ in range(2)) if with_state else None
    with torch.set_grad_enabled(grad):
        got, want = gated(x, states), dense(x, states)
        assert_same(got, want)
        assert_close(pad_packed_sequence(got[0])[0], pad_packed_sequence(want[0])[0])
    if grad:
        for a, b in zip(*(torch.autograd.grad(flat(r)[0].sum(), dense.parameters()) for r in (got, want)), strict=True):
            assert_close(a, b)


def test_packed_sequences_equal_each_sequence_alone():
    lstm = bg.DynamicSparseLSTM(6, 7, 2, **GATED).eval()
    sequences = [torch.randn(n, 6) for n in (2, 5, 1)]
    y, (h, _) = lstm(pack_sequence(sequences, enforce_sorted=False))
    padded, _ = pad_packed_sequence(y)
    for n, sequence in enumerate(sequences):
        alone, (h_alone, _) = lstm(sequence)
        assert_close(padded[: len(sequence), n], alone)
        assert_close(h[:, n], h_alone)


@pytest.mark.parametrize("grad", [True, False])
def test_chunks_with_carried_state_equal_one_run(grad):
    lstm = bg.DynamicSparseLSTM(6, 8, 2, **GATED).eval()
    x = torch.randn(9, 2, 6)
    with torch.set_grad_enabled(grad):
        whole, end = lstm(x)
        state, parts = None, []
        for chunk in x.split([4, 1, 3, 1]):
            part, state = lstm(chunk, state)
            parts.append(part)
    assert_same((torch.cat(parts), state), (whole, end))
