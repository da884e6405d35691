"""Packed LSTMs: the same results as the layers they were made from, in every storage type, and loading."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import blockgate as bg
from blockgate.formats import FORMATS
from blockgate.runtime import PackedLSTM
from tests.helpers import assert_close, raises_blockgate

DTYPES = list(FORMATS)
# How far a whole LSTM may be off by rounding the weights, relative to its output.
ROUNDING = {"float32": 1e-5, "bfloat16": 0.01, "int8": 0.02, "int4": 0.15}


def make(kind, layers=2):
    if kind == "dense":
        return nn.LSTM(40, 48, layers).eval()
    return bg.DynamicSparseLSTM(40, 48, layers, block_size=16, key_size=20, sparsity=0.5, select="per_row").eval()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["dense", "gated"])
@pytest.mark.parametrize("shape", [(1, 1, 40), (6, 1, 40), (1, 5, 40), (6, 5, 40), (6, 40)])
@torch.no_grad()
def test_agrees_with_the_layer_it_was_made_from(kind, dtype, shape):
    torch.manual_seed(0)
    lstm = make(kind)
    packed = bg.pack(lstm, dtype)
    assert type(packed) is PackedLSTM
    x = torch.randn(shape)
    state = tuple(torch.randn(2, *shape[1:-1], 48) * 0.5 for _ in range(2))
    for hx in (None, state):
        (y, (h, c)), (want, (want_h, want_c)) = packed(x, hx), lstm(x, hx)
        for a, b in ((y, want), (h, want_h), (c, want_c)):
            assert a.shape == b.shape
            assert (a - b).norm() < ROUNDING[dtype] * b.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_chunks_and_batches_do_not_change_a_bit(dtype):
    packed = bg.pack(make("gated"), dtype)
    x = torch.randn(7, 3, 40)
    whole, _ = packed(x)
    state, parts = None, []
    for chunk in x.split([1, 4, 2]):
        part, state = packed(chunk, state)
        parts.append(part)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(packed(x[:, 1:2])[0], whole[:, 1:2])


@pytest.mark.parametrize("kind", ["dense", "gated"])
@torch.no_grad()
def test_packed_sequences_and_batch_first(kind):
    lstm = make(kind)
    packed = bg.pack(lstm)
    x = pack_sequence([torch.randn(n, 40) for n in (2, 5, 3)], enforce_sorted=False)
    (y, (h, c)), (want, (want_h, want_c)) = packed(x), lstm(x)
    for a, b in ((y.data, want.data), (h, want_h), (c, want_c)):
        assert_close(a, b)
    lstm.batch_first = True
    x = torch.randn(3, 5, 40)
    assert_close(bg.pack(lstm)(x)[0], lstm(x)[0])


@torch.no_grad()
def test_gates_with_hooks_and_other_kinds_are_called():
    lstm = make("gated", layers=1)
    packed = bg.pack(lstm)
    x = torch.randn(4, 3, 40)
    want = packed(x)[0]
    seen = []
    packed.hh_l0.gate.register_forward_hook(lambda *call: seen.append(call[2][0].shape[0]))
    assert_close(packed(x)[0], want)
    assert seen == [3] * 4
    other = bg.DynamicSparseLSTM(40, 48, block_size=16, gate="sigmoid", sparsity=0.0).eval()
    assert_close(bg.pack(other)(x)[0], other(x)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["dense", "gated"])
@torch.no_grad()
def test_loads_packed_and_unpacked_checkpoints(kind, dtype):
    lstm, other = make(kind), make(kind)
    x = torch.randn(4, 2, 40)
    want = bg.pack(other, dtype)(x)[0]
    for state in (other.state_dict(), bg.pack(other, dtype).state_dict()):
        packed = bg.pack(nn.Sequential(lstm), dtype)
        assert not torch.equal(packed(x)[0], want)
        packed.load_state_dict({f"0.{key}": value for key, value in state.items()})
        assert torch.equal(packed(x)[0], want)
    with pytest.raises(RuntimeError, match="Missing key"):
        packed.load_state_dict({})
    with pytest.raises(RuntimeError, match="size mismatch"):
        packed.load_state_dict(
            {f"0.{key}": value for key, value in make("dense", 2).state_dict().items()}
            | {"0.weight_ih_l0": torch.zeros(3, 3)}
        )


@torch.no_grad()
def test_whole_language_model():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(50, 40)
            self.lstm = make("gated")
            self.qrnn = bg.DynamicSparseQRNN(48, 48, 2, block_size=16)
            self.decoder = nn.Linear(48, 50)

        def forward(self, words):
            return self.decoder(self.qrnn(self.lstm(self.embedding(words))[0])[0])

    model = Model().eval()
    words = torch.randint(0, 50, (6, 2))
    for dtype in DTYPES:
        packed = bg.pack(model, dtype)
        assert not [
            m for m in packed.modules() if isinstance(m, (nn.Linear, bg.DynamicSparseLinear, bg.DynamicSparseLSTM))
        ]
        assert (packed(words) - model(words)).abs().max() < (0.15 if dtype == "int4" else 0.05)
    weights = sum(
        t.numel() * t.element_size() for name, t in bg.pack(model, torch.int8).state_dict().items() if "blocks" in name
    )
    assert weights < 0.3 * 4 * sum(
        p.numel() for n, p in model.named_parameters() if n.endswith(("weight_hh_l0", "weight")) or "weight_" in n
    )


@torch.no_grad()
def test_sparsity_may_change_after_packing():
    lstm = make("gated")
    packed = bg.pack(lstm)
    x = torch.randn(3, 1, 40)
    for model in (lstm, packed):
        bg.set_sparsity(model, 0.8)
    assert_close(packed(x)[0], lstm(x)[0])


@torch.no_grad()
def test_copies_moves_and_modes():
    packed = bg.pack(make("gated"), torch.int8)
    x = torch.randn(3, 1, 40)
    want = packed(x)[0]
    assert torch.equal(copy.deepcopy(packed)(x)[0], want)
    assert torch.equal(packed.train().double().to("cpu")(x)[0], want)
    assert not packed.training


def test_bidirectional_lstms_stay_as_they_are():
    model = nn.ModuleDict({"both": nn.LSTM(4, 5, bidirectional=True), "one": nn.LSTM(4, 5)})
    packed = bg.pack(model)
    assert type(packed["both"]) is nn.LSTM
    assert type(packed["one"]) is PackedLSTM


def test_an_input_with_gradient_is_a_clear_error():
    packed = bg.pack(make("gated"))
    with raises_blockgate("Packed models are for inference"):
        packed(torch.randn(3, 1, 40, requires_grad=True))


@pytest.mark.parametrize("kind", ["dense", "gated"])
@torch.no_grad()
def test_wrong_inputs_and_states_are_clear_errors(kind):
    packed = bg.pack(make(kind))
    x, state = torch.randn(3, 2, 40), torch.zeros(2, 2, 48)
    for wrong in (x[..., 1:], x[:0], x[0, 0]):
        with raises_blockgate("input: expected shape (time, batch, 40)"):
            packed(wrong)
    for wrong in ((state, state[:1]), (state[:, :1], state[:, :1]), (state,), state):
        with raises_blockgate("hx: expected (h, c), each of shape (2, 2, 48)"):
            packed(x, wrong)
