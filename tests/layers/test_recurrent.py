"""Gated LSTMs and GRUs against a step-by-step reference made of gated linear layers, and against torch's."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

import blockgate as bg
from tests.helpers import assert_close

GATED = {"block_size": 4, "sparsity": 0.5, "key_size": None}


def linear_of(matrix):
    """A gated linear layer that shares the parameters of one matrix of a recurrent layer."""
    linear = bg.DynamicSparseLinear(matrix.grid.in_features, matrix.grid.out_features, block_size=matrix.grid.block)
    linear.weight, linear.bias, linear.gate = matrix.weight, matrix.bias, matrix.gate
    return linear


@dataclass(frozen=True)
class Kind:
    """A recurrent layer of torch and its gated form, in one direction or two."""

    dense: type
    gated: type
    both: bool = False

    @property
    def directions(self):
        return 2 if self.both else 1

    def make_dense(self, *sizes, **options):
        return self.dense(*sizes, bidirectional=self.both, **options)

    def make(self, *sizes, **options):
        return self.gated(*sizes, bidirectional=self.both, **options)

    def state(self, *shape, **options):
        """A random state as the layer takes it; `shape` begins with the number of layers."""
        shape = (shape[0] * self.directions, *shape[1:])
        made = tuple(torch.randn(shape, **options) for _ in range(2 if self.dense is nn.LSTM else 1))
        return made if len(made) == 2 else made[0]


KINDS = {
    "lstm": Kind(nn.LSTM, bg.DynamicSparseLSTM),
    "gru": Kind(nn.GRU, bg.DynamicSparseGRU),
    "lstm, both ways": Kind(nn.LSTM, bg.DynamicSparseLSTM, both=True),
    "gru, both ways": Kind(nn.GRU, bg.DynamicSparseGRU, both=True),
}
EACH_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def lstm_cell(from_input, from_state, state):
    i, f, g, o = (from_input + from_state).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_cell(from_input, from_state, state):
    (x_r, x_z, x_n), (h_r, h_z, h_n) = from_input.chunk(3, -1), from_state.chunk(3, -1)
    z = (x_z + h_z).sigmoid()
    n = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    return ((1 - z) * n + z * state[0],)


def step_by_step(layer, x, hx):
    """x (T, N, in) through every layer and direction, one step at a time, straight from the equations."""
    cell = lstm_cell if isinstance(layer, bg.DynamicSparseLSTM) else gru_cell
    states = list(zip(*states_of(hx), strict=True))
    last = []
    for number in range(layer.num_layers):
        outputs = []
        for end in ("", "_reverse")[: 2 if layer.bidirectional else 1]:
            from_input, from_state = (linear_of(layer.matrix(part, f"_l{number}{end}")) for part in ("ih", "hh"))
            state, made = states.pop(0), []
            for x_t in x.flip(0) if end else x:
                state = cell(from_input(x_t), from_state(state[0]), state)
                made.append(state[0])
            outputs.append(torch.stack(made[::-1] if end else made))
            last.append(state)
        x = torch.cat(outputs, -1)
    return x, tuple(torch.stack(each) for each in zip(*last, strict=True))


def states_of(state):
    return state if isinstance(state, tuple) else (state,)


def flat(result):
    y, state = result
    return (y.data if isinstance(y, PackedSequence) else y, *states_of(state))


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


@EACH_KIND
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_equations_with_all_gradients(case, backend, kind):
    torch.manual_seed(0)
    layer = kind.make(6, 7, **{**GATED, **CASES[case]}, backend=backend, dtype=torch.float64)
    layer.eval()  # softmax_sum takes the argmax then
    x = torch.randn(5, 3, 6, dtype=torch.float64, requires_grad=True)
    hx = kind.state(layer.num_layers, 3, 7, dtype=torch.float64, requires_grad=True)
    got, want = flat(layer(x, hx)), flat(step_by_step(layer, x, hx))
    inputs = (x, *states_of(hx), *(p for p in layer.parameters() if p.requires_grad))
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


@EACH_KIND
@pytest.mark.parametrize("normalise", ["mean", "rms"])
def test_gradcheck(normalise, kind):
    torch.manual_seed(3)
    layer = kind.make(4, 3, 2, block_size=2, sparsity=0.4, key_size=2, normalise=normalise, dtype=torch.float64)
    for matrix in layer.matrices().values():
        # Far from ties and from the kink of ReLU, where a finite difference means nothing.
        matrix.gate.bias.data.copy_(torch.linspace(1.0, 9.0, matrix.gate.num_scores))
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    parameters = tuple(layer.parameters())

    def run(x, *_):
        return flat(layer(x))

    assert torch.autograd.gradcheck(run, (x, *parameters))


@EACH_KIND
@pytest.mark.parametrize("grad", [True, False])
def test_with_one_open_gate_it_is_torchs_layer(grad, kind):
    """A single block whose gate is open is the dense matrix, whatever its score, because gates average 1."""
    dense = kind.make_dense(6, 7, 2)
    gated = kind.gated.from_dense(dense, block_size=64, sparsity=0.0).eval()
    x, hx = torch.randn(5, 3, 6), kind.state(2, 3, 7)
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


@EACH_KIND
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shapes_are_those_of_torchs_layer(layout, grad, kind):
    batch_first, shape, state = LAYOUTS[layout]
    dense = kind.make_dense(6, 7, 2, batch_first=batch_first)
    gated = kind.gated.from_dense(dense, block_size=64, sparsity=0.0).eval()
    x, hx = torch.randn(shape), kind.state(*state)
    with torch.set_grad_enabled(grad):
        for state in (None, hx):
            got, want = gated(x, state), dense(x, state)
            assert_same(got, want)
            assert [t.shape for t in flat(got)] == [t.shape for t in flat(want)]
            assert type(got[1]) is type(want[1])


@EACH_KIND
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("lengths", [[4, 4, 4], [5, 3, 3, 1], [1, 6, 2]])
@pytest.mark.parametrize("with_state", [True, False])
def test_packed_sequences(lengths, grad, with_state, kind):
    dense = kind.make_dense(6, 7, 2)
    gated = kind.gated.from_dense(dense, block_size=64, sparsity=0.0).eval()
    x = pack_sequence([torch.randn(n, 6) for n in lengths], enforce_sorted=False)
    states = kind.state(2, len(lengths), 7) if with_state else None
    with torch.set_grad_enabled(grad):
        got, want = gated(x, states), dense(x, states)
        assert_same(got, want)
        assert_close(pad_packed_sequence(got[0])[0], pad_packed_sequence(want[0])[0])
    if grad:
        for a, b in zip(*(torch.autograd.grad(flat(r)[0].sum(), dense.parameters()) for r in (got, want)), strict=True):
            assert_close(a, b)


@EACH_KIND
def test_packed_sequences_equal_each_sequence_alone(kind):
    layer = kind.make(6, 7, 2, **GATED).eval()
    sequences = [torch.randn(n, 6) for n in (2, 5, 1)]
    y, h, *_ = flat_packed(layer(pack_sequence(sequences, enforce_sorted=False)))
    for n, sequence in enumerate(sequences):
        alone, h_alone, *_ = flat(layer(sequence))
        assert_close(y[: len(sequence), n], alone)
        assert_close(h[:, n], h_alone)


def flat_packed(result):
    y, state = result
    return (pad_packed_sequence(y)[0], *states_of(state))


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("grad", [True, False])
def test_chunks_with_carried_state_equal_one_run(grad, kind):
    layer = KINDS[kind].make(6, 8, 2, **GATED).eval()
    x = torch.randn(9, 2, 6)
    with torch.set_grad_enabled(grad):
        whole, end = layer(x)
        state, parts = None, []
        for chunk in x.split([4, 1, 3, 1]):
            part, state = layer(chunk, state)
            parts.append(part)
    assert_same((torch.cat(parts), state), (whole, end))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("gate", ["margin", "norm", "sigmoid"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_none_is_answered_with_none(grad, gate, kind):
    options = {"gate": gate, "block_size": 4} | ({"sparsity": 0} if gate == "sigmoid" else {})
    layer = KINDS[kind].make(6, 8, 2, **options)
    dense, x = KINDS[kind].make_dense(6, 8, 2), torch.randn(3, 0, 6, requires_grad=grad)
    with torch.set_grad_enabled(grad):
        for one in [layer] if grad else [layer, bg.pack(layer, "int8")]:
            y, wanted = flat(one(x)), flat(dense(x))
            assert all(a.shape == b.shape for a, b in zip(y, wanted, strict=True))
    if grad:
        y[0].sum().backward()
        assert all(p.grad is None or not p.grad.count_nonzero() for p in layer.parameters())
