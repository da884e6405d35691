"""Small models with MLPs that can share one gate, for tests."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.convert.pairs import find_pairs
from tests.model_zoo import WIDTH, bert, encoder, gpt2, sequence, tokens

HIDDEN, BLOCK = 64, 8


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 16}
    sizes = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes, **heads, bos_token_id=0, eos_token_id=0))


def distilbert():
    from transformers import DistilBertConfig, DistilBertModel

    return DistilBertModel(DistilBertConfig(vocab_size=40, dim=WIDTH, hidden_dim=HIDDEN, n_layers=1, n_heads=4))


def sequential():
    parts = [nn.Linear(WIDTH, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, WIDTH)]
    return nn.Sequential(*parts, nn.Linear(WIDTH, 96), nn.SiLU(), nn.Linear(96, WIDTH))


# How to make each, an input for it, the names of its paired MLPs.
MODELS = {
    "gpt2": (gpt2, lambda: {"input_ids": tokens()}, ["transformer.h.0.mlp.act", "transformer.h.1.mlp.act"]),
    "bert": (bert, lambda: {"input_ids": tokens()}, ["bert.encoder.layer.0.intermediate.intermediate_act_fn"]),
    "llama": (llama, lambda: {"input_ids": tokens()}, ["model.layers.0.mlp.act_fn", "model.layers.1.mlp.act_fn"]),
    "distilbert": (
        distilbert,
        lambda: {"input_ids": tokens()},
        ["transformer.layer.0.ffn.activation"],
    ),
    "encoder": (lambda: encoder(batch_first=True), sequence, ["layers.0.activation", "layers.1.activation"]),
    "transformer": (
        lambda: nn.Transformer(WIDTH, 4, 1, 1, 64, 0.1, activation="gelu", batch_first=True),
        lambda: (sequence(), sequence()),
        ["encoder.layers.0.activation", "decoder.layers.0.activation"],
    ),
    "sequential": (sequential, sequence, ["1", "5"]),
}
EACH = pytest.mark.parametrize("name", MODELS)


def made(name, seed=0):
    torch.manual_seed(seed)
    make, example, names = MODELS[name]
    return make().eval(), example(), names


def mlps(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, bg.DynamicSparseMLP)}


def in_a_pair(model_name, layer_name):
    model, _, _ = made(model_name)
    return any(layer_name in pair.names.values() for pair in find_pairs(model))
