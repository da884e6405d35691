"""Screened output layers in models: made by `pack`, never stale, saved and loaded as plain ones."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.ops import native
from blockgate.ops.screened_topk.reference import exact_scores
from blockgate.runtime.packed import PackedLinear
from blockgate.runtime.screened import ScreenedLinear
from tests.helpers import raises_blockgate

WORDS, FEATURES = 300, 48


class Tied(nn.Module):
    """An embedding, a layer, and an output layer that shares the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, FEATURES)
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, WORDS)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        return self.head(self.layer(self.embedding(words)))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Tied()


def expected(layer, x, k):
    scores = exact_scores(x.reshape(-1, FEATURES).float(), layer.weight.float(), layer.bias)
    values, indices = scores.sort(dim=1, descending=True, stable=True)
    shape = (*x.shape[:-1], k)
    return values[:, :k].reshape(shape), indices[:, :k].reshape(shape)


def check(layer, x, k=5):
    found = layer.topk(x, k)
    for part, wanted in zip(found, expected(layer, x, k), strict=True):
        torch.testing.assert_close(part, wanted, rtol=0, atol=0)


def test_pack_makes_them_and_keeps_shared_weights_shared(model):
    packed = bg.pack(model, "int8", screened="head")
    assert type(packed.head) is ScreenedLinear
    assert type(packed.layer) is PackedLinear
    assert packed.head.weight is packed.embedding.weight
    assert packed.head.weight.data_ptr() != model.head.weight.data_ptr()
    assert not any(p.requires_grad for p in packed.parameters())
    torch.testing.assert_close(packed.head.weight, model.head.weight, rtol=0, atol=0)
    x = torch.randn(2, 3, FEATURES)
    torch.testing.assert_close(packed.head(x), model.head(x))
    check(packed.head, x)
    check(packed.head, torch.randn(FEATURES), k=1)
    check(packed.head, torch.randn(0, FEATURES))
    check(packed.head, torch.randn(4, 2 * FEATURES)[:, ::2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types(model, dtype):
    packed = bg.pack(model.to(dtype), screened=["head"])
    assert packed.head.weight.dtype == torch.float32
    check(packed.head, torch.randn(3, FEATURES, dtype=dtype))


def test_ranks(model):
    head = bg.pack(model, screened="head").head
    x = torch.randn(2, 3, FEATURES)
    order = head.topk(x, WORDS).indices
    targets = torch.randint(WORDS, (2, 3))
    assert torch.equal(order.gather(-1, head.rank(x, targets)[..., None]).squeeze(-1), targets)


def test_patterns_must_name_plain_linear_layers(model):
    with raises_blockgate(
        "screened: expected patterns that name plain nn.Linear layers, without hooks, got 'lm_head, which"
    ):
        bg.pack(model, screened="lm_head")
    with raises_blockgate("'embedding, which names embedding'"):
        bg.pack(model, screened="embedding")
    model.head.register_forward_hook(lambda *_: None)
    with raises_blockgate("without hooks"):
        bg.pack(model, screened="head")


def test_edited_weights_are_never_missed(model):
    head = bg.pack(model, screened="head").head
    x = torch.randn(4, FEATURES)
    check(head, x)
    with torch.no_grad():
        head.weight[7] = 10 * x[0]
    check(head, x)
    assert head.topk(x, 1).indices[0] == 7
    with torch.no_grad():
        head.bias[9] = 1e6
    assert (head.topk(x, 1).indices == 9).all()
    head.weight = nn.Parameter(torch.randn(WORDS, FEATURES), requires_grad=False)
    check(head, x)
    head.load_state_dict({"weight": torch.randn(WORDS, FEATURES), "bias": torch.zeros(WORDS)})
    check(head, x)


def test_checkpoints_are_those_of_a_plain_layer(model):
    packed, other = bg.pack(model, screened="head"), bg.pack(Tied(), screened="head")
    assert set(packed.head.state_dict()) == {"weight", "bias"}
    other.load_state_dict(packed.state_dict())
    x = torch.randn(4, FEATURES)
    check(other.head, x)
    for copied in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        torch.testing.assert_close(copied.head.topk(x, 3), packed.head.topk(x, 3), rtol=0, atol=0)


def test_packed_in_inference_mode(model):
    with torch.inference_mode():
        head = bg.pack(model, screened="head").head
        check(head, torch.randn(2, FEATURES))
    assert not head.weight.is_inference()


def test_bad_arguments_are_clear_errors(model):
    head = bg.pack(model, screened="head").head
    x = torch.randn(2, FEATURES)
    for k in (0, WORDS + 1, 2.0, True):
        with raises_blockgate("k: expected a whole number from 1 to out_features, 300"):
            head.topk(x, k)
        with raises_blockgate("k: expected a whole number from 1 to out_features, 300"):
            head.count_survivors(x, k)
    with raises_blockgate("input: expected shape (..., 48)"):
        head.topk(x[:, :40], 1)
    with raises_blockgate("input: expected a tensor on cpu, as the layer's weight"):
        head.topk(x.to("meta"), 1)
    with raises_blockgate("targets: expected whole numbers of shape (2,)"):
        head.rank(x, torch.tensor([1]))
    with raises_blockgate("targets: expected numbers from 0 to 299, got '-100 to 3'"):
        head.rank(x, torch.tensor([3, -100]))
    with torch.no_grad():
        model.head.weight[0, 0] = torch.nan
    with raises_blockgate("weight: expected finite floating numbers"):
        bg.pack(model, screened="head")


@pytest.mark.skipif(native.unavailable_reason() is not None, reason="native kernels are not built")
def test_what_is_read(model):
    head = bg.pack(model, screened="head").head
    # 19 panels of 2 groups: 256 bytes of codes and 16 of steps each, and 4 floats a row.
    assert head.scanned_bytes == 19 * (2 * (256 + 16) + 4 * 16 * 4)
    counts = head.count_survivors(head.weight[:8].view(2, 4, FEATURES), 1)
    assert counts.shape == (2, 4)
    assert (counts >= 1).all()
    assert (counts < 75).all()


def test_without_kernels_the_reference_finds_the_same(model, monkeypatch):
    head = bg.pack(model, screened="head").head
    x = torch.randn(4, FEATURES)
    native_result = head.topk(x, 4), head.rank(x, torch.arange(4))
    monkeypatch.setattr("blockgate.runtime.screened.unavailable_reason", lambda: "not built")
    plain = copy.deepcopy(head)
    torch.testing.assert_close((plain.topk(x, 4), plain.rank(x, torch.arange(4))), native_result, rtol=0, atol=0)
