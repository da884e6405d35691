"""The decoder on a cache of fixed length: the logits of transformers, one token at a time, compiled whole."""

from __future__ import annotations

import copy

import pytest
import torch

import blockgate as bg
from blockgate.lab.models.llama import LlamaDecoder
from blockgate.runtime import PackedColumnLinear
from tests.helpers import assert_close, raises_blockgate
from tests.model_zoo import gpt2

transformers = pytest.importorskip("transformers")

WORDS = torch.randint(50, (12,), generator=torch.Generator().manual_seed(1))


def llama(**options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6}
    config = transformers.LlamaConfig(
        vocab_size=50, num_key_value_heads=2, max_position_embeddings=64, **sizes, **options
    )
    return transformers.LlamaForCausalLM(config).eval()


def steps(decoder):
    return torch.cat([decoder(WORDS[at : at + 1], torch.tensor([at])) for at in range(len(WORDS))])


@pytest.mark.parametrize("options", [{}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}])
@torch.no_grad()
def test_the_logits_of_transformers(options):
    model = llama(**options)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    want = model(WORDS[None]).logits[0]
    decoder = LlamaDecoder(model, 20)
    assert_close(decoder(WORDS, torch.arange(12)), want)
    # Again, over what is left in the cache: places that come later are not seen.
    assert_close(steps(decoder), want)
    both = torch.cat([decoder(WORDS[:5], torch.arange(5)), decoder(WORDS[5:], torch.arange(5, 12))])
    assert_close(both, want)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@torch.no_grad()
def test_gated_packed_and_compiled_as_one_graph(backend):
    decoder = LlamaDecoder(llama(), 20)
    bg.sparsify_(decoder, gate="norm", block_size=(1 << 20, 1), sparsity=0.25, filter_fn=lambda _, name: name != "head")
    bg.set_sparsity(decoder, {"layers.0.mlp_out": 0.5})
    packed = bg.pack(decoder, "int8")
    assert sum(isinstance(layer, PackedColumnLinear) for layer in packed.modules()) == 8
    want = steps(packed)
    compiled = torch.compile(copy.deepcopy(packed), fullgraph=True, backend=backend)
    assert_close(steps(compiled), want)


def test_other_models_are_refused():
    for model, name in ((gpt2(), "GPT2LMHeadModel"), (torch.nn.Linear(2, 2), "Linear")):
        with raises_blockgate(f"model: expected a LlamaForCausalLM of transformers with SiLU, got '{name}'"):
            LlamaDecoder(model, 8)
    with raises_blockgate("length: expected"):
        LlamaDecoder(llama(), 0)
