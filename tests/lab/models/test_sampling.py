"""Text drawn from a model."""

from __future__ import annotations

import pytest
import torch

import blockgate as bg
from blockgate.lab.data import Vocabulary
from blockgate.lab.models import ImageNetwork, ImageNetworkConfig, LanguageModel, LanguageModelConfig
from blockgate.lab.models.sampling import sample
from blockgate.spec import GateSpec
from tests.helpers import assert_close, raises_blockgate

VOCABULARY = Vocabulary(["<eos>", "<unk>", *(f"w{n}" for n in range(18))])


@pytest.fixture
def model():
    config = LanguageModelConfig(
        cell="qrnn", matrices="dynamic", embedding_size=8, hidden_size=16, gate=GateSpec(block_size=4)
    )
    made = LanguageModel(config, len(VOCABULARY)).eval()
    # Far apart, so that the likeliest word is clear.
    torch.nn.init.normal_(made.embedding.weight, std=2.0)
    return made


def test_a_seed_decides_the_text(model):
    texts = [list(sample(model, VOCABULARY, words=30, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == 30


def test_packed_models_write_the_same_text(model):
    packed = bg.pack(model)
    assert type(packed.layers[0].filters[0]).__name__ == "PackedDynamicSparseLinear"
    assert list(sample(packed, VOCABULARY, words=30)) == list(sample(model, VOCABULARY, words=30))


def test_cold_text_is_the_likeliest_and_follows_the_prompt(model):
    drawn = list(sample(model, VOCABULARY, prompt=["w3", "w5"], words=5, temperature=0))
    assert drawn == list(sample(model, VOCABULARY, prompt=["w3", "w5"], words=5, top_k=1, seed=9))
    words = ["<eos>", "w3", "w5", *drawn]
    log_probabilities, _ = model(VOCABULARY.encode(words[:-1])[:, None])
    assert log_probabilities[2:, 0].argmax(-1).tolist() == VOCABULARY.encode(drawn).tolist()


def test_draws_follow_the_probabilities(model):
    with torch.no_grad():
        expected = model(VOCABULARY.encode(["<eos>"])[:, None])[0][0, 0].div(2.0).softmax(0)
    drawn = [next(sample(model, VOCABULARY, words=1, temperature=2.0, seed=seed)) for seed in range(500)]
    counts = VOCABULARY.encode(drawn).bincount(minlength=len(VOCABULARY)) / len(drawn)
    assert (counts - expected).abs().max() < 0.08


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": ["w3", "zebra"]}, "expected words of the vocabulary, got 'zebra'"),
        ({"temperature": -1.0}, "temperature"),
        ({"words": 0}, "words and top_k"),
        ({"top_k": 0}, "words and top_k"),
    ],
)
def test_bad_wishes_are_refused_at_once(model, options, message):
    with raises_blockgate(message):
        sample(model, VOCABULARY, **options)


def test_the_image_network_is_the_papers():
    with torch.device("meta"):
        network = ImageNetwork(ImageNetworkConfig())
    shapes = [
        tuple(p.shape) for name, p in network.named_parameters() if name.endswith("weight") and "gate" not in name
    ]
    assert shapes == [(1024, 784), *[(1024, 1024)] * 5, (10, 1024)]
    gated = [module for module in network.modules() if isinstance(module, bg.DynamicSparseLinear)]
    assert {(layer.sparsity, layer.grid.block) for layer in gated} == {(0.9, (128, 128))}
    assert len(gated) == 5


def test_image_scores_are_those_of_the_layers():
    network = ImageNetwork(ImageNetworkConfig(matrices="dense", hidden_size=6, hidden_layers=1), pixels=4, classes=3)
    first, hidden, last = (m for m in network.modules() if isinstance(m, torch.nn.Linear))
    images = torch.randn(5, 2, 2)
    assert_close(network(images), last(hidden(first(images.flatten(1)).relu()).relu()))


@pytest.mark.parametrize("cutoffs", [(), (4, 9)])
def test_the_likeliest_words_are_those_of_the_log_probabilities(cutoffs):
    torch.manual_seed(0)
    config = LanguageModelConfig(embedding_size=8, hidden_size=8, cutoffs=cutoffs)
    made = LanguageModel(config, 20).eval()
    words = torch.randint(20, (5, 3))
    with torch.no_grad():
        log_probabilities, carried = made(words)
        expected, numbers = log_probabilities[-1].topk(4)
        scores, found, state = made.likeliest(words, k=4)
    assert torch.equal(found, numbers)
    assert_close(scores - scores[:, :1], expected - expected[:, :1])
    torch.testing.assert_close(state, carried)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 5}, {"top_k": 100, "temperature": 0.5}])
def test_screened_models_write_the_same_text(model, options):
    screened = bg.pack(model, screened="softmax.decoder")
    assert screened.softmax.decoder.weight is screened.embedding.weight
    texts = [list(sample(m, VOCABULARY, words=30, **options)) for m in (model, bg.pack(model), screened)]
    assert texts[0] == texts[1] == texts[2]
