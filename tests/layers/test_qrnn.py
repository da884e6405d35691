"""Quasi-RNNs, dense and gated, against a step-by-step formula; state carried over chunks; packing; bad input."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import blockgate as bg
from tests.helpers import assert_close, raises_blockgate

GATED = {"block_size": 4, "sparsity": 0.5}


def step_by_step(qrnn, x):
    """x (T, N, in) through every layer, one step at a time, straight from the equations."""
    for layer, window in enumerate(qrnn.windows):
        filter_ = qrnn.filters[layer]
        outputs, state, last = [], None, torch.zeros_like(x[0])
        for x_t in x:
            seen = torch.cat([x_t, last], -1) if window == 2 else x_t
            parts = filter_(seen).chunk(3 if qrnn.pooling == "fo" else 2, -1)
            z, f = parts[0].tanh(), parts[1].sigmoid()
            state = (1 - f) * z if state is None else f * state + (1 - f) * z
            outputs.append(parts[2].sigmoid() * state if qrnn.pooling == "fo" else state)
            last = x_t
        x = torch.stack(outputs)
    return x


@pytest.mark.parametrize("kind", [bg.layers.QRNN, bg.DynamicSparseQRNN])
@pytest.mark.parametrize("pooling", ["f", "fo"])
@pytest.mark.parametrize(("layers", "window", "output"), [(1, 2, None), (3, (2, 1, 1), 5), (2, 1, None)])
def test_equals_the_equations_with_all_gradients(kind, pooling, layers, window, output):
    options = GATED if kind is bg.DynamicSparseQRNN else {}
    qrnn = kind(6, 7, layers, window=window, output_size=output, pooling=pooling, dtype=torch.float64, **options)
    qrnn.eval()
    x = torch.randn(5, 3, 6, dtype=torch.float64, requires_grad=True)
    y, _ = qrnn(x)
    want = step_by_step(qrnn, x)
    assert y.shape == (5, 3, output or 7)
    assert_close(y, want)
    inputs = (x, *qrnn.parameters())
    grad = torch.randn_like(y)
    for a, b in zip(torch.autograd.grad(y, inputs, grad), torch.autograd.grad(want, inputs, grad), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("kind", [bg.layers.QRNN, bg.DynamicSparseQRNN])
def test_chunks_with_carried_state_equal_one_run(kind):
    qrnn = kind(6, 8, 3, window=(2, 1, 2), **(GATED if kind is bg.DynamicSparseQRNN else {})).eval()
    x = torch.randn(9, 2, 6)
    whole, end = qrnn(x)
    state, parts = None, []
    for chunk in x.split([4, 1, 3, 1]):
        part, state = qrnn(chunk, state)
        parts.append(part)
    assert_close(torch.cat(parts), whole)
    for (c, last), (want_c, want_last) in zip(state, end, strict=True):
        assert_close(c, want_c)
        assert (last is None) == (want_last is None)


def test_layouts():
    qrnn, first = bg.layers.QRNN(4, 5), bg.layers.QRNN(4, 5, batch_first=True)
    first.load_state_dict(qrnn.state_dict())
    x = torch.randn(6, 3, 4)
    y, _ = qrnn(x)
    assert_close(first(x.transpose(0, 1))[0], y.transpose(0, 1))
    assert_close(qrnn(x[:, 1])[0], y[:, 1])


def test_sparsity_zero_with_equal_gates_is_the_dense_qrnn():
    dense = bg.layers.QRNN(6, 8, 2, window=(2, 1)).eval()
    gated = bg.DynamicSparseQRNN.from_dense(dense, block_size=4, sparsity=0)
    assert gated.filters[0].weight is dense.filters[0].weight
    for filter_ in gated.filters:
        nn.init.zeros_(filter_.gate.weight)
        nn.init.ones_(filter_.gate.bias)
    x = torch.randn(5, 2, 6)
    assert_close(gated(x)[0], dense(x)[0])


def test_the_gate_reads_the_current_step():
    qrnn = bg.DynamicSparseQRNN(6, 8, window=2, key_size=6, **GATED)
    assert qrnn.filters[0].in_features == 12
    x = torch.randn(3, 1, 6)
    other = x.clone()
    other[0] += 1
    seen = [torch.cat([t[1], t[0]], -1) for t in (x, other)]
    torch.testing.assert_close(*(qrnn.filters[0].gates(s) for s in seen), rtol=0, atol=0)


def test_the_paper_s_model_has_its_gates_and_weights():
    with torch.device("meta"):
        qrnn = bg.DynamicSparseQRNN(512, 1536, 4, window=(2, 1, 1, 1), output_size=512, key_size=384, block_size=128)
    sizes = [tuple(f.weight.shape[::-1]) for f in qrnn.filters]
    assert sizes == [(1024, 4608), (1536, 4608), (1536, 4608), (1536, 1536)]
    assert sum(f.grid.num_blocks for f in qrnn.filters) == 1296
    assert round(sum(f.weight.numel() for f in qrnn.filters) / 1e6, 1) == 21.2


def test_zoneout_keeps_states_in_training_and_scales_in_eval():
    qrnn = bg.layers.QRNN(4, 400, zoneout=0.5, pooling="f")
    x = torch.randn(2, 1, 4)
    y, _ = qrnn(x)
    kept = (y[0] == 0).float().mean().item()
    assert 0.4 < kept < 0.6
    qrnn.eval()
    parts = qrnn.filters[0](torch.cat([x[0], torch.zeros(1, 4)], -1)).chunk(2, -1)
    assert_close(qrnn(x)[0][0], 0.5 * (1 - parts[1].sigmoid()) * parts[0].tanh())


def test_dropout_is_between_layers_only():
    qrnn = bg.layers.QRNN(4, 50, 2, dropout=0.9, window=1)
    torch.manual_seed(1)
    a, _ = qrnn(torch.ones(1, 1, 4))
    b, _ = qrnn(torch.ones(1, 1, 4))
    assert not torch.equal(a, b)
    single = bg.layers.QRNN(4, 50, 1, dropout=0.9)
    assert_close(single(torch.ones(1, 1, 4))[0], single(torch.ones(1, 1, 4))[0])


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.int8, 0.03)])
def test_packs_as_a_whole(dtype, error):
    qrnn = bg.DynamicSparseQRNN(64, 96, 2, window=(2, 1), block_size=16, sparsity=0.5).eval()
    packed, x = bg.pack(qrnn, dtype), torch.randn(7, 3, 64)
    with torch.no_grad():
        want, got = qrnn(x)[0], packed(x)[0]
    assert (got - want).norm() / want.norm() < error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 3}, "window: expected 1 or 2, or 2 of them, got 3"),
        ({"window": (2, 1, 1)}, "window: expected 1 or 2, or 2 of them, got (2, 1, 1)"),
        ({"hidden_size": 0}, "hidden_size: expected a positive int, got 0"),
        ({"output_size": -1}, "output_size: expected a positive int, got -1"),
        ({"pooling": "ifo"}, "pooling: expected one of ('f', 'fo'), got 'ifo'"),
        ({"zoneout": 1.0}, "zoneout: expected a share in [0, 1), got 1.0"),
        ({"dropout": -0.1}, "dropout: expected a share in [0, 1), got -0.1"),
    ],
)
def test_bad_options_are_refused(arguments, message):
    with raises_blockgate(message):
        bg.layers.QRNN(**{"input_size": 4, "hidden_size": 5, "num_layers": 2, **arguments})


def test_bad_inputs_are_refused():
    qrnn = bg.layers.QRNN(4, 5, 2)
    for x in (torch.ones(3, 2, 5), torch.ones(4), torch.ones(0, 2, 4)):
        with raises_blockgate("input: expected shape (time, batch, 4) or (time, 4), with at least one step"):
            qrnn(x)
    _, state = qrnn(torch.ones(3, 2, 4))
    with raises_blockgate("state: expected one entry for each of 2 layers, got 1"):
        qrnn(torch.ones(3, 2, 4), state[:1])
    with raises_blockgate("from_dense: expected a QRNN, got 'LSTM'"):
        bg.DynamicSparseQRNN.from_dense(nn.LSTM(4, 5))
