"""Dropouts of recurrent language models: what they drop, and what they leave alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.layers.dropout import DropoutEmbedding, LockedDropout, weight_drop_
from tests.helpers import raises_blockgate


@pytest.mark.parametrize("batch_first", [False, True])
def test_locked_dropout_drops_the_same_features_at_every_step(batch_first):
    torch.manual_seed(0)
    x = torch.ones(6, 7, 50)
    y = LockedDropout(0.4, batch_first)(x)
    time = 1 if batch_first else 0
    first = y.select(time, 0)
    assert torch.equal(y, first.unsqueeze(time).expand_as(y))
    assert y.unique().tolist() == pytest.approx([0, 1 / 0.6])
    assert not torch.equal(first[0], first[1]), "every sequence has its own mask"
    assert (y == 0).float().mean() == pytest.approx(0.4, abs=0.1)


def test_locked_dropout_of_an_unbatched_sequence_and_in_eval():
    x = torch.ones(6, 50)
    y = LockedDropout(0.5, batch_first=True)(x)
    assert torch.equal(y, y[:1].expand_as(y))
    assert LockedDropout(0.5).eval()(x) is x
    assert LockedDropout(0.0)(x) is x


def test_embedding_dropout_drops_whole_words_everywhere():
    torch.manual_seed(0)
    embedding = DropoutEmbedding(100, 8, p=0.3)
    words = torch.randint(0, 100, (40, 30))
    y = embedding(words)
    dropped = (y == 0).all(-1)
    for word in words.unique():
        of_word = dropped[words == word]
        assert of_word.all() or not of_word.any()
    kept = ~dropped
    torch.testing.assert_close(y[kept], nn.functional.embedding(words, embedding.weight)[kept] / 0.7)
    assert 0.1 < dropped.float().mean() < 0.5
    embedding.eval()
    assert torch.equal(embedding(words), nn.functional.embedding(words, embedding.weight))
    assert list(embedding.state_dict()) == ["weight"]


MODULES = {
    "nn.LSTM": (lambda: nn.LSTM(6, 8, 2), ["weight_hh_l0", "weight_hh_l1"], (3, 2, 6)),
    "nn.Linear": (lambda: nn.Linear(6, 8), ["weight"], (5, 6)),
    "gated linear": (
        lambda: bg.DynamicSparseLinear(6, 8, block_size=2, gate="sigmoid", sparsity=0.0),
        ["weight"],
        (5, 6),
    ),
}


def output_of(module, x):
    y = module(x)
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.parametrize("kind", MODULES)
def test_weight_drop_drops_in_training_alone(kind):
    make, names, shape = MODULES[kind]
    torch.manual_seed(0)
    module = make()
    x = torch.randn(shape)
    plain = output_of(module, x)
    keys, parameters = list(module.state_dict()), list(module.parameters())
    assert weight_drop_(module, names, 0.5) is module

    first, second = output_of(module, x), output_of(module, x)
    assert not torch.equal(first, second)
    with torch.no_grad():
        assert not torch.equal(output_of(module, x), output_of(module, x)), "also without gradients"
    first.sum().backward()
    for name in names:
        share = (getattr(module, name).grad == 0).float().mean()
        assert 0.2 < share < 0.8, "dropped entries get no gradient"
    assert list(module.state_dict()) == keys
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    module.eval()
    torch.testing.assert_close(output_of(module, x), plain)
    weight_drop_(module.train(), names, 0.0)
    torch.testing.assert_close(output_of(module, x), plain)


def test_weight_drop_survives_an_error_and_a_copy():
    linear = weight_drop_(nn.Linear(4, 3), "weight", 0.5)
    with pytest.raises(RuntimeError):
        linear(torch.randn(2, 5))
    assert "weight" not in linear.__dict__
    other = copy.deepcopy(linear)
    other(torch.randn(2, 4)).sum().backward()
    assert other.weight.grad is not None
    assert linear.weight.grad is None
    assert other.weight is not linear.weight


def test_weight_drop_does_not_break_packing_or_loading():
    layer = weight_drop_(bg.DynamicSparseLinear(32, 48, block_size=16), "weight", 0.5)
    layer.load_state_dict(bg.DynamicSparseLinear(32, 48, block_size=16).state_dict())
    x = torch.randn(3, 32)
    with torch.no_grad():
        layer.eval()
        torch.testing.assert_close(bg.pack(nn.Sequential(layer))(x), layer(x))


def test_clear_errors():
    with raises_blockgate("share in [0, 1)"):
        LockedDropout(1.0)
    with raises_blockgate("share in [0, 1)"):
        DropoutEmbedding(3, 4, p=-0.1)
    with raises_blockgate("names of parameters"):
        weight_drop_(nn.Linear(2, 2), "weights", 0.5)
