"""Gated LSTMs and GRUs in use: inference, hooks, dropouts, checkpoints, types, cells, clear errors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import blockgate as bg
from blockgate.ops import native
from tests.helpers import assert_close, raises_blockgate
from tests.layers.test_recurrent import EACH_KIND, GATED, KINDS, assert_same, flat, states_of


@EACH_KIND
@pytest.mark.parametrize("shape", [(4, 1, 70), (4, 3, 70), (1, 1, 70), (1, 5, 70), (4, 70)])
@pytest.mark.parametrize(("hidden", "block"), [(50, 16), (48, 16), (37, (24, 9))])
def test_inference_agrees_with_training(shape, hidden, block, kind):
    layer = kind.make(70, hidden, 2, block_size=block, key_size=20).eval()
    x = torch.randn(shape)
    with torch.no_grad():
        fast = layer(x)
        assert layer.plan(x).path == ("fused native" if native.unavailable_reason() is None else "reference")
    assert_same(fast, layer(x))


@EACH_KIND
def test_inference_follows_the_weights(kind):
    lstm = kind.make(20, 24, block_size=8).eval()
    x = torch.randn(3, 1, 20)
    with torch.no_grad():
        before = lstm(x)[0]
        lstm.weight_hh_l0.mul_(2)
        assert_same(lstm(x), with_grad(lstm, x))
        assert not torch.equal(lstm(x)[0], before)
        bg.set_sparsity(lstm, 0.9)
        assert_same(lstm(x), with_grad(lstm, x))
        lstm.load_state_dict(kind.make(20, 24, block_size=8).state_dict())
        assert_same(lstm(x), with_grad(lstm, x))


def with_grad(lstm, x):
    with torch.enable_grad():
        y, state = lstm(x)
    return y.detach(), tuple(s.detach() for s in states_of(state))


@EACH_KIND
def test_hooked_gates_see_every_step(kind):
    lstm = kind.make(6, 8, **GATED).eval()
    x = torch.randn(4, 3, 6)
    with torch.no_grad():
        plain = lstm(x)
        rows = {"ih": [], "hh": []}
        lstm.gate_ih_l0.register_forward_hook(lambda *call: rows["ih"].append(call[2][0].shape[0]))
        lstm.gate_hh_l0.register_forward_hook(lambda *call: rows["hh"].append(call[2][0].shape[0]))
        assert_same(lstm(x), plain)
    assert rows == {"ih": [12], "hh": [3] * 4}


@EACH_KIND
def test_dropout_between_layers_in_training_alone(kind):
    lstm = kind.make(6, 8, 2, dropout=0.5, **GATED)
    x = torch.randn(4, 3, 6)
    with torch.no_grad():
        assert not torch.equal(lstm(x)[0], lstm(x)[0])
        lstm.eval()
        assert torch.equal(lstm(x)[0], lstm(x)[0])
    one = kind.make(6, 8, 1, dropout=0.5, gate="topk", **GATED)
    assert_same(one(x), one(x))


@EACH_KIND
def test_weight_drop_on_the_recurrent_weights(kind):
    lstm = bg.layers.weight_drop_(kind.make(6, 8, **GATED), "weight_hh_l0", 0.5)
    x = torch.randn(4, 3, 6)
    keys = list(lstm.state_dict())
    with torch.no_grad():
        assert not torch.equal(lstm(x)[0], lstm(x)[0]), "no packed copy of dropped weights"
    lstm(x)[0].sum().backward()
    assert 0.2 < (lstm.weight_hh_l0.grad == 0).float().mean() < 0.8
    assert list(lstm.state_dict()) == keys
    lstm.eval()
    with torch.no_grad():
        assert_same(bg.pack(nn.ModuleList([lstm]))[0](x), lstm(x))


@EACH_KIND
def test_checkpoints_of_torchs_layer_load(kind):
    dense, gated = kind.make_dense(6, 8, 2), kind.make(6, 8, 2, **GATED)
    missing, unexpected = gated.load_state_dict(dense.state_dict(), strict=False)
    assert not unexpected
    assert all(name.startswith("gate_") for name in missing)
    assert torch.equal(gated.weight_ih_l1, dense.weight_ih_l1)
    assert [n for n, _ in gated.named_parameters() if not n.startswith("gate_")] == [
        n for n, _ in dense.named_parameters()
    ]


@EACH_KIND
def test_from_dense_starts_near_the_dense_layer(kind):
    torch.manual_seed(0)
    dense = kind.make_dense(64, 64, 2, batch_first=True, dropout=0.25)
    gated = kind.gated.from_dense(dense, block_size=16, sparsity=0.0).eval()
    assert (gated.batch_first, gated.dropout, gated.bidirectional) == (True, 0.25, kind.both)
    x = torch.randn(6, 4, 64)
    want = dense.eval()(x)[0]
    assert (gated(x)[0] - want).norm() / want.norm() < 0.05


@EACH_KIND
def test_fresh_weights_are_those_of_torchs_layer(kind):
    torch.manual_seed(0)
    gated = kind.make(6, 400, **GATED)
    bound = 1 / 20
    assert gated.weight_ih_l0.abs().max() <= bound
    assert gated.weight_ih_l0.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    assert (gated.gate_ih_l0.bias == 0).all()
    before = gated.weight_hh_l0.clone()
    gated.reset_parameters()
    assert not torch.equal(gated.weight_hh_l0, before)
    assert gated.weight_hh_l0.abs().max() <= bound


@EACH_KIND
def test_double_half_and_autocast(kind):
    lstm = kind.make(6, 8, **GATED)
    x = torch.randn(4, 3, 6)
    want = lstm(x)[0]
    assert lstm.double()(x.double())[0].dtype == torch.float64
    half = lstm.to(torch.bfloat16)(x.bfloat16())
    assert {t.dtype for t in flat(half)} == {torch.bfloat16}
    assert (half[0] - want).abs().max() < 0.1
    lstm.float()
    with torch.autocast("cpu", torch.bfloat16):
        y, state = lstm(x)
    assert y.dtype == torch.bfloat16
    assert {s.dtype for s in states_of(state)} == {torch.float32}


@EACH_KIND
def test_copies_and_compile(kind):
    lstm = kind.make(6, 8, **GATED).eval()
    x = torch.randn(4, 3, 6)
    with torch.no_grad():
        want = lstm(x)
        assert_same(copy.deepcopy(lstm)(x), want)
    compiled = torch.compile(lstm, backend="aot_eager", fullgraph=True)
    assert_same(compiled(x), lstm(x))


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_it_learns(kind):
    torch.manual_seed(0)
    lstm = KINDS[kind].make(8, 32, block_size=8, sparsity=0.5, normalise="rms")
    head = nn.Linear(32, 8)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=1e-2)
    x = torch.nn.functional.one_hot(torch.randint(0, 8, (12, 16)), 8).float()
    losses = []
    for _ in range(60):
        # What came two steps ago.
        loss = nn.functional.cross_entropy(head(lstm(x)[0])[2:].flatten(0, 1), x[:-2].argmax(-1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


CELLS = {
    "lstm": (nn.LSTMCell, bg.layers.DynamicSparseLSTMCell),
    "gru": (nn.GRUCell, bg.layers.DynamicSparseGRUCell),
}


@pytest.mark.parametrize("kind", CELLS)
def test_cell_is_one_step_of_the_layer(kind):
    layer = KINDS[kind].make(6, 8, **GATED).eval()
    cell = CELLS[kind][1](6, 8, **GATED).eval()
    cell.load_state_dict({k.replace("_l0", ""): v for k, v in layer.state_dict().items()})
    x = torch.randn(5, 3, 6)
    whole, _ = layer(x)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            state = None
            for x_t, want in zip(x, whole, strict=True):
                state = cell(x_t, state)
                assert_close(states_of(state)[0], want)
    single = states_of(cell(x[0, 0]))
    assert {s.shape for s in single} == {(8,)}
    assert_close(single[0], whole[0, 0])


@pytest.mark.parametrize("kind", CELLS)
def test_cell_from_dense(kind):
    dense = CELLS[kind][0](6, 8)
    cell = CELLS[kind][1].from_dense(dense, block_size=64, sparsity=0.0)
    x, hx = torch.randn(3, 6), tuple(torch.randn(3, 8) for _ in range(2))
    hx = hx if kind == "lstm" else hx[0]
    for got, want in zip(states_of(cell(x, hx)), states_of(dense(x, hx)), strict=True):
        assert_close(got, want)
    assert cell.weight_ih is dense.weight_ih


def test_clear_errors_of_lstms():
    lstm = bg.DynamicSparseLSTM(6, 8, 2, **GATED)
    x = torch.randn(4, 3, 6)
    with raises_blockgate("expected no projection, got 'proj_size=3'"):
        bg.DynamicSparseLSTM(6, 8, proj_size=3)
    with raises_blockgate("an LSTM with no projection"):
        bg.DynamicSparseLSTM.from_dense(nn.LSTM(6, 8, proj_size=3))
    with raises_blockgate("an nn.LSTM"):
        bg.DynamicSparseLSTM.from_dense(nn.GRU(6, 8))
    with raises_blockgate("an nn.LSTMCell"):
        bg.layers.DynamicSparseLSTMCell.from_dense(nn.GRUCell(6, 8))
    for state in (torch.zeros(2, 3, 8), (torch.zeros(2, 3, 8),), (torch.zeros(1, 3, 8),) * 2, (torch.zeros(2, 8),) * 2):
        with raises_blockgate("(h, c), each of shape (2, 3, 8)"):
            lstm(x, state)
    with raises_blockgate("(h, c), each of shape (2, 8)"):
        lstm(x[:, 0], (torch.zeros(2, 1, 8),) * 2)
    with raises_blockgate("(h, c), each of shape (4, 3, 8)"):
        bg.DynamicSparseLSTM(6, 8, 2, bidirectional=True, **GATED)(x, (torch.zeros(2, 3, 8),) * 2)


def test_clear_errors_of_grus():
    gru = bg.DynamicSparseGRU(6, 8, 2, **GATED)
    x = torch.randn(4, 3, 6)
    with raises_blockgate("an nn.GRU, got 'LSTM'"):
        bg.DynamicSparseGRU.from_dense(nn.LSTM(6, 8))
    with raises_blockgate("an nn.GRUCell"):
        bg.layers.DynamicSparseGRUCell.from_dense(nn.LSTMCell(6, 8))
    for state in ((torch.zeros(2, 3, 8),) * 2, torch.zeros(1, 3, 8), torch.zeros(2, 8), "words"):
        with raises_blockgate("hx: expected h of shape (2, 3, 8)"):
            gru(x, state)
    with raises_blockgate("h of shape (2, 8)"):
        gru(x[:, 0], torch.zeros(2, 1, 8))


@EACH_KIND
def test_clear_errors(kind):
    layer = kind.make(6, 8, 2, **GATED)
    with raises_blockgate("share in [0, 1)"):
        kind.make(6, 8, dropout=1.5)
    with raises_blockgate("num_layers: expected a positive int"):
        kind.make(6, 8, 0)
    for wrong in (torch.randn(4, 3, 5), torch.randn(6), torch.randn(0, 3, 6), "words"):
        with raises_blockgate("with at least one step"):
            layer(wrong)
    with raises_blockgate("with at least one step"):
        layer(pack_padded_sequence(torch.randn(4, 3, 5), [4, 2, 1]))
    with raises_blockgate("torch.float32, as the layer's weight"):
        layer(torch.randn(4, 3, 6).double())


@EACH_KIND
@torch.no_grad()
def test_what_models_call_on_torchs_layers(kind):
    layer = kind.make(6, 8, **GATED).eval()
    x = torch.randn(4, 3, 6)
    want = layer(x)
    for made in (layer, bg.pack(layer)):
        made.flatten_parameters()
        assert_same(made(x), want)


@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_refuses_sequences(kind):
    with raises_blockgate("A cell makes one step"):
        CELLS[kind][1](6, 8)(torch.randn(4, 3, 6))
