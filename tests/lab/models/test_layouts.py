"""Recurrent layers as one stack or one by one: when which, and checkpoints of one that load into the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blockgate.convert import pack
from blockgate.lab.models import LanguageModel, LanguageModelConfig, language_model
from blockgate.lab.models.layouts import layer_name, stack_states
from blockgate.spec import GateSpec
from tests.helpers import assert_close

WORDS = 50
SMALL = LanguageModelConfig(
    embedding_size=12, hidden_size=16, num_layers=3, projection=True, gate=GateSpec(block_size=4, sparsity=0.5)
)
kinds = pytest.mark.parametrize("kind", ["dense", "dynamic", "static"])
cells = pytest.mark.parametrize("cell", ["lstm", "qrnn"])


@pytest.fixture
def one_by_one(monkeypatch):
    """Makes models as former versions did: one module for each recurrent layer."""

    def make(config):
        with monkeypatch.context() as patch:
            patch.setattr(language_model, "_fits_one_stack", lambda _: False)
            return LanguageModel(config, WORDS)

    return make


@pytest.mark.parametrize(
    ("options", "modules"),
    [
        ({}, 1),
        ({"dropout": 0.5, "locked": False}, 1),
        ({"dropout": 0.5}, 3),
        ({"projection": False}, 3),
        ({"projection": False, "cell": "qrnn"}, 1),
        ({"projection": False, "tied": False}, 1),
        ({"dropout": 0.5, "cell": "qrnn"}, 3),
        ({"dropout": 0.5, "num_layers": 1}, 1),
    ],
)
@kinds
def test_one_stack_wherever_it_computes_the_same(options, modules, kind):
    model = LanguageModel(replace(SMALL, matrices=kind, **options), WORDS)
    assert len(model.layers) == modules
    assert model.is_one_stack == (modules == 1)
    assert model.matrix_layers == tuple(f"layers.{n}" for n in range(modules))


@kinds
@cells
def test_checkpoints_of_single_layers_load_into_a_stack_and_back(kind, cell, one_by_one):
    config = replace(SMALL, cell=cell, matrices=kind)
    single, stack = one_by_one(config).eval(), LanguageModel(config, WORDS).eval()
    assert "layers.1.weight_ih_l0" in single.state_dict() or "layers.1.filters.0.weight" in single.state_dict()
    words = torch.randint(0, WORDS, (6, 2))
    want, carried = single(words)
    further, _ = single(words, carried)
    stack.load_state_dict(single.state_dict())
    assert_close(stack(words)[0], want)
    assert_close(stack(words, stack.own_states(carried))[0], further)
    back = one_by_one(config).eval()
    back.load_state_dict(stack.state_dict())
    assert_close(back(words)[0], want)
    assert back.own_states(carried) is carried


@kinds
@cells
@torch.no_grad()
def test_packed_checkpoints_of_single_layers_load_into_a_packed_stack(kind, cell, one_by_one):
    config = replace(SMALL, cell=cell, matrices=kind)
    single, packed = one_by_one(config).eval(), pack(LanguageModel(config, WORDS).eval())
    words = torch.randint(0, WORDS, (6, 2))
    for saved in (single.state_dict(), pack(single).state_dict()):
        packed.load_state_dict(saved)
        assert_close(packed(words)[0], single(words)[0])


def test_a_model_inside_of_another_loads_too(one_by_one):
    inside, stack = torch.nn.Sequential(one_by_one(SMALL)), torch.nn.Sequential(LanguageModel(SMALL, WORDS))
    stack.load_state_dict(inside.state_dict())
    assert torch.equal(stack[0].layers[0].weight_hh_l2, inside[0].layers[2].weight_hh_l0)


def test_names():
    pairs = {
        "layers.2.weight_ih_l0": "layers.0.weight_ih_l2",
        "layers.1.gate_hh_l0.hidden_weight": "layers.0.gate_hh_l1.hidden_weight",
        "layers.12.filters.0.gate.bias": "layers.0.filters.12.gate.bias",
        "layers.1.ih_l0.packed.blocks": "layers.0.ih_l1.packed.blocks",
        "layers.1.pattern_ih_l0": "layers.0.pattern_ih_l1",
        "embedding.weight": "embedding.weight",
    }
    for single, stacked in pairs.items():
        for name in (single, stacked):
            assert layer_name(name, stacked=True) == stacked
            assert layer_name(name, stacked=False) == single


def test_states_of_single_layers_become_those_of_a_stack():
    h, c = torch.randn(2, 3, 4, 5).unbind()
    stacked = stack_states(tuple((h[n : n + 1], c[n : n + 1]) for n in range(3)))
    torch.testing.assert_close(stacked, ((h, c),))
    layers = [(torch.randn(4, 5), None) for _ in range(3)]
    assert stack_states(tuple((layer,) for layer in layers)) == (tuple(layers),)


@cells
@kinds
def test_weight_dropout_reaches_every_layer_of_a_stack(cell, kind):
    model = LanguageModel(replace(SMALL, cell=cell, matrices=kind, weight_dropout=0.5), WORDS)
    stack = model.layers[0]
    seen = {}

    def look(module, *_):
        names = (name for name in module.__dict__ if "weight" in name and name in module._parameters)
        seen.setdefault(module, set()).update(names)

    for module in (stack, *stack.modules()):
        module.register_forward_pre_hook(look)
    model(torch.randint(0, WORDS, (6, 2)))
    if cell == "lstm":
        assert seen[stack] == {"weight_hh_l0", "weight_hh_l1", "weight_hh_l2"}
    else:
        assert [seen[filter_] for filter_ in stack.filters] == [{"weight"}] * 3


@cells
@kinds
def test_plain_dropout_stands_between_the_layers_of_a_stack(cell, kind):
    config = replace(SMALL, cell=cell, matrices=kind, locked=False, dropout=0.5, input_dropout=0.0, output_dropout=0.0)
    model, words = LanguageModel(config, WORDS), torch.randint(0, WORDS, (6, 2))
    assert model.is_one_stack
    assert not torch.equal(model(words)[0], model(words)[0])
    model.eval()
    assert torch.equal(model(words)[0], model(words)[0])
