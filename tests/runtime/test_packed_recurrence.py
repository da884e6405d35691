"""Packed LSTMs and GRUs: the same results as the layers they were made from, in every storage type, and loading."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import blockgate as bg
from blockgate.formats import FORMATS
from blockgate.runtime import PackedGRU, PackedLSTM
from tests.helpers import assert_close, raises_blockgate
from tests.layers.test_recurrent import EACH_KIND, KINDS, flat

DTYPES = list(FORMATS)
# How far a whole LSTM may be off by rounding the weights, relative to its output.
ROUNDING = {"float32": 1e-5, "bfloat16": 0.01, "float16": 0.002, "int8": 0.02, "int8a8": 0.04, "int4": 0.15}


EACH_MAKE = pytest.mark.parametrize("make", ["dense", "gated"])


def build(kind, make="gated", layers=2):
    if make == "dense":
        return kind.make_dense(40, 48, layers).eval()
    return kind.make(40, 48, layers, block_size=16, key_size=20, sparsity=0.5, select="per_row").eval()


def lstm():
    return build(KINDS["lstm"])


@EACH_KIND
@pytest.mark.parametrize("dtype", DTYPES)
@EACH_MAKE
@pytest.mark.parametrize("shape", [(1, 1, 40), (6, 1, 40), (1, 5, 40), (6, 5, 40), (6, 40)])
@torch.no_grad()
def test_agrees_with_the_layer_it_was_made_from(make, dtype, shape, kind):
    torch.manual_seed(0)
    layer = build(kind, make)
    packed = bg.pack(layer, dtype)
    assert type(packed) is (PackedLSTM if kind.dense is nn.LSTM else PackedGRU)
    x = torch.randn(shape)
    state = kind.state(2, *shape[1:-1], 48)
    for hx in (None, state):
        for a, b in zip(flat(packed(x, hx)), flat(layer(x, hx)), strict=True):
            assert a.shape == b.shape
            assert (a - b).norm() < ROUNDING[dtype] * b.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["lstm", "gru"])
@torch.no_grad()
def test_chunks_and_batches_do_not_change_a_bit(dtype, kind):
    packed = bg.pack(build(KINDS[kind]), dtype)
    x = torch.randn(7, 3, 40)
    whole, _ = packed(x)
    state, parts = None, []
    for chunk in x.split([1, 4, 2]):
        part, state = packed(chunk, state)
        parts.append(part)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(packed(x[:, 1:2])[0], whole[:, 1:2])


@EACH_KIND
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_threads_and_batches_do_not_change_a_bit(dtype, kind):
    packed = bg.pack(build(kind), dtype)
    x = torch.randn(7, 3, 40)
    whole, _ = packed(x)
    assert torch.equal(packed(x[:, 1:2])[0], whole[:, 1:2])
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(packed(x)[0], whole)
    finally:
        torch.set_num_threads(before)


@EACH_KIND
@EACH_MAKE
@torch.no_grad()
def test_packed_sequences_and_batch_first(make, kind):
    layer = build(kind, make)
    packed = bg.pack(layer)
    x = pack_sequence([torch.randn(n, 40) for n in (2, 5, 3)], enforce_sorted=False)
    for a, b in zip(flat(packed(x)), flat(layer(x)), strict=True):
        assert_close(a, b)
    layer.batch_first = True
    x = torch.randn(3, 5, 40)
    assert_close(bg.pack(layer)(x)[0], layer(x)[0])


@EACH_KIND
@torch.no_grad()
def test_gates_with_hooks_and_other_kinds_are_called(kind):
    layer = build(kind, layers=1)
    packed = bg.pack(layer)
    x = torch.randn(4, 3, 40)
    want = packed(x)[0]
    seen = []
    packed.hh_l0.gate.register_forward_hook(lambda *call: seen.append(call[2][0].shape[0]))
    assert_close(packed(x)[0], want)
    assert seen == [3] * 4
    assert packed.plan(x).path in {"step by step", "reference"}
    other = kind.make(40, 48, block_size=16, gate="sigmoid", sparsity=0.0).eval()
    assert_close(bg.pack(other)(x)[0], other(x)[0])


@EACH_KIND
@pytest.mark.parametrize("dtype", DTYPES)
@EACH_MAKE
@torch.no_grad()
def test_loads_packed_and_unpacked_checkpoints(make, dtype, kind):
    layer, other = build(kind, make), build(kind, make)
    x = torch.randn(4, 2, 40)
    want = bg.pack(other, dtype)(x)[0]
    for state in (other.state_dict(), bg.pack(other, dtype).state_dict()):
        packed = bg.pack(nn.Sequential(layer), dtype)
        assert not torch.equal(packed(x)[0], want)
        packed.load_state_dict({f"0.{key}": value for key, value in state.items()})
        assert torch.equal(packed(x)[0], want)
    with pytest.raises(RuntimeError, match="Missing key"):
        packed.load_state_dict({})
    with pytest.raises(RuntimeError, match="size mismatch"):
        packed.load_state_dict(
            {f"0.{key}": value for key, value in build(kind, "dense").state_dict().items()}
            | {"0.weight_ih_l0": torch.zeros(3, 3)}
        )


@torch.no_grad()
def test_whole_language_model():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(50, 40)
            self.lstm = lstm()
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
    layer = lstm()
    packed = bg.pack(layer)
    x = torch.randn(3, 1, 40)
    for model in (layer, packed):
        bg.set_sparsity(model, 0.8)
    assert_close(packed(x)[0], layer(x)[0])


@torch.no_grad()
def test_copies_moves_and_modes():
    packed = bg.pack(lstm(), torch.int8)
    x = torch.randn(3, 1, 40)
    want = packed(x)[0]
    assert torch.equal(copy.deepcopy(packed)(x)[0], want)
    assert torch.equal(packed.train().double().to("cpu")(x)[0], want)
    assert not packed.training


def test_what_is_not_implemented_stays_as_it_is():
    model = nn.ModuleDict({"projected": nn.LSTM(4, 5, proj_size=2), "plain": nn.RNN(4, 5), "one": nn.LSTM(4, 5)})
    packed = bg.pack(model)
    assert type(packed["projected"]) is nn.LSTM
    assert type(packed["plain"]) is nn.RNN
    assert type(packed["one"]) is PackedLSTM


@EACH_KIND
def test_an_input_with_gradient_is_a_clear_error(kind):
    packed = bg.pack(build(kind))
    with raises_blockgate("Packed models are for inference"):
        packed(torch.randn(3, 1, 40, requires_grad=True))


@EACH_MAKE
@torch.no_grad()
def test_wrong_inputs_and_states_are_clear_errors(make):
    packed, gru = bg.pack(build(KINDS["lstm"], make)), bg.pack(build(KINDS["gru"], make))
    x, state = torch.randn(3, 2, 40), torch.zeros(2, 2, 48)
    for wrong in (x[..., 1:], x[:0], x[0, 0]):
        for layer in (packed, gru):
            with raises_blockgate("input: expected shape (time, batch, 40)"):
                layer(wrong)
    for wrong in ((state, state[:1]), (state[:, :1], state[:, :1]), (state,), state):
        with raises_blockgate("hx: expected (h, c), each of shape (2, 2, 48)"):
            packed(x, wrong)
    for wrong in ((state, state), state[:1]):
        with raises_blockgate("hx: expected h of shape (2, 2, 48)"):
            gru(x, wrong)
