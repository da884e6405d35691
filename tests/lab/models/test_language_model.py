"""The language model: what its parts promise, whatever kind of matrices it is built of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from blockgate.convert import pack
from blockgate.lab.models import LanguageModel, LanguageModelConfig
from blockgate.lab.models.plain import from_plain, to_plain
from blockgate.lab.models.softmax import AdaptiveSoftmax, FullSoftmax
from blockgate.runtime import PackedLinear
from blockgate.spec import GateSpec
from tests.helpers import assert_close, raises_blockgate

WORDS = 50
GATE = GateSpec(block_size=4, sparsity=0.5)
SMALL = LanguageModelConfig(embedding_size=12, hidden_size=16, num_layers=3, gate=GATE)
KINDS = [
    replace(SMALL, cell="lstm", matrices="dense"),
    replace(SMALL, cell="lstm", matrices="dynamic"),
    replace(SMALL, cell="qrnn", matrices="dense"),
    replace(SMALL, cell="qrnn", matrices="dynamic", cutoffs=(10, 30), projection=True),
    replace(SMALL, cell="qrnn", matrices="dynamic", tied=False),
]
kinds = pytest.mark.parametrize(
    "config", KINDS, ids=lambda c: f"{c.cell}-{c.matrices}-{'tied' if c.tied else 'untied'}"
)


def some_words(steps: int = 9, columns: int = 3) -> torch.Tensor:
    return torch.randint(0, WORDS, (steps, columns))


@kinds
def test_probabilities_sum_to_1(config):
    log_probabilities, _ = LanguageModel(config, WORDS).eval()(some_words())
    assert log_probabilities.shape == (9, 3, WORDS)
    assert_close(log_probabilities.exp().sum(-1), torch.ones(9, 3))


@kinds
def test_the_loss_is_that_of_the_probabilities(config):
    model = LanguageModel(config, WORDS).eval()
    words, targets = some_words(), some_words()
    log_probabilities, _ = model(words)
    losses = model.loss(words, targets)
    assert_close(losses.per_word, -log_probabilities.gather(2, targets[..., None])[..., 0])
    targets[0, 0] = -1
    masked = model.loss(words, targets).per_word
    assert masked[0, 0] == 0
    assert_close(masked[1:], losses.per_word[1:])


@kinds
def test_a_carried_state_is_one_long_run(config):
    model = LanguageModel(config, WORDS).eval()
    words = some_words(12)
    whole, end = model(words)
    first, carried = model(words[:5])
    second, carried = model(words[5:6], carried)
    third, carried = model(words[6:], carried)
    assert_close(torch.cat([first, second, third]), whole)
    torch.testing.assert_close(carried, end)
    fresh, _ = model(words[6:])
    assert not torch.allclose(fresh, third)


@kinds
def test_every_parameter_learns(config):
    model = LanguageModel(config, WORDS)
    targets = torch.arange(WORDS).repeat(2).view(-1, 4)
    model.loss(some_words(*targets.shape), targets).per_word.mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("cutoffs", [(), (10,)])
def test_tied_weights_are_one_parameter(cutoffs):
    tied = LanguageModel(replace(SMALL, cutoffs=cutoffs), WORDS)
    assert tied.softmax.decoder.weight is tied.embedding.weight
    assert len([p for p in tied.parameters() if p.shape == (WORDS, 12)]) == 1
    untied = LanguageModel(replace(SMALL, cutoffs=cutoffs, tied=False), WORDS)
    assert len([p for p in untied.parameters() if p.shape[0] == WORDS and p.dim() == 2]) == 2
    copy = LanguageModel(replace(SMALL, cutoffs=cutoffs), WORDS)
    copy.load_state_dict(tied.state_dict())
    assert copy.embedding.weight is copy.softmax.decoder.weight
    assert_close(copy.eval()(some_words(2))[0].exp().sum(-1), torch.ones(2, 3))


def test_adaptive_softmax_is_torchs_with_full_width():
    ours = AdaptiveSoftmax(8, WORDS, (10, 30))
    nn.init.normal_(ours.group_bias)
    theirs = nn.AdaptiveLogSoftmaxWithLoss(8, WORDS, cutoffs=[10, 30], div_value=1.0, head_bias=True)
    with torch.no_grad():
        theirs.head.weight.copy_(torch.cat([ours.decoder.weight[:10], ours.group_weight]))
        theirs.head.bias.copy_(torch.cat([ours.decoder.bias[:10], ours.group_bias]))
        for tail, words in zip(theirs.tail, (slice(10, 30), slice(30, WORDS)), strict=True):
            tail[0].weight.copy_(torch.eye(8))
            tail[1].weight.copy_(ours.decoder.weight[words])
    x, targets = torch.randn(40, 8), torch.randint(0, WORDS, (40,))
    assert_close(ours(x), theirs.log_prob(x))
    assert_close(-ours.loss(x, targets), theirs(x, targets).output)
    only_frequent = torch.randint(0, 10, (40,))
    assert_close(-ours.loss(x, only_frequent), theirs(x, only_frequent).output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_packed_adaptive_softmax_keeps_its_answers_and_its_loss(dtype):
    softmax = AdaptiveSoftmax(8, WORDS, (10, 30))
    nn.init.normal_(softmax.decoder.weight)
    packed = pack(softmax, dtype)
    x, targets = torch.randn(40, 8), torch.randint(0, WORDS, (40,))
    rounding = 1e-5 if dtype == torch.float32 else 0.1
    with torch.no_grad():
        assert isinstance(packed.decoder, PackedLinear)
        torch.testing.assert_close(packed(x), softmax(x), rtol=0, atol=rounding)
        torch.testing.assert_close(packed.loss(x, targets), softmax.loss(x, targets), rtol=0, atol=rounding)


def test_hooks_on_the_decoder_count_in_the_loss_too():
    softmax = AdaptiveSoftmax(8, WORDS, (10, 30))
    x, targets = torch.randn(40, 8), torch.randint(0, WORDS, (40,))
    softmax.decoder.register_forward_hook(lambda _, __, scores: 2 * scores)
    assert_close(softmax.loss(x, targets), -softmax(x).gather(-1, targets[:, None]).squeeze(-1))


def test_full_softmax_has_a_bias_and_takes_any_weight():
    weight = nn.Parameter(torch.randn(WORDS, 8))
    softmax = FullSoftmax(8, WORDS, weight)
    x = torch.randn(4, 8)
    assert_close(softmax(x), torch.log_softmax(x @ weight.t() + softmax.decoder.bias, -1))


@pytest.mark.parametrize(
    ("cutoffs", "kept"), [((10, WORDS, 1000), [10, WORDS]), ((WORDS,), None), ((1000, 4000), None)]
)
def test_a_small_vocabulary_has_fewer_groups(cutoffs, kept):
    softmax = LanguageModel(replace(SMALL, cutoffs=cutoffs), WORDS).softmax
    assert getattr(softmax, "bounds", None) == kept


@pytest.mark.parametrize("cutoffs", [(0,), (20, 10), (10, 10)])
def test_bad_cutoffs_are_refused(cutoffs):
    with raises_blockgate("cutoffs"):
        LanguageModel(replace(SMALL, cutoffs=cutoffs), WORDS)


@pytest.mark.parametrize("name", ["word_dropout", "dropout", "input_dropout", "output_dropout", "weight_dropout"])
@pytest.mark.parametrize("cell", ["lstm", "qrnn"])
def test_each_dropout_acts_in_training_alone(name, cell):
    torch.manual_seed(1)
    model = LanguageModel(replace(SMALL, cell=cell, **{name: 0.5}), WORDS)
    words = some_words()
    assert not torch.equal(model(words)[0], model(words)[0])
    model.eval()
    assert torch.equal(model(words)[0], model(words)[0])
    # Checkpoints know nothing of it.
    without = LanguageModel(replace(SMALL, cell=cell), WORDS).eval()
    without.load_state_dict(model.state_dict())
    assert_close(without(words)[0], model(words)[0])


def test_quasi_rnn_layers_have_the_papers_shapes():
    config = LanguageModelConfig(cell="qrnn", embedding_size=512, hidden_size=1536, num_layers=4, windows=(2, 1))
    with torch.device("meta"):
        model = LanguageModel(config, WORDS)
    shapes = [tuple(filter_.weight.shape) for filter_ in model.layers[0].filters]
    assert shapes == [(4608, 1024), (4608, 1536), (4608, 1536), (1536, 1536)]


def test_configs_survive_json():
    config = replace(SMALL, cutoffs=(3, 9), input_dropout=0.2, gate=replace(GATE, key_size=None, block_size=(4, 2)))
    plain = to_plain(config)
    assert plain["cutoffs"] == [3, 9]
    assert from_plain(LanguageModelConfig, plain) == config


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"hiden_size": 3}, "config: expected some of"),
        ({"gate": {"block": 3}}, "config.gate: expected some of"),
        ({"hidden_size": "3"}, "config.hidden_size: expected int, got '3'"),
        ({"hidden_size": True}, "config.hidden_size: expected int, got True"),
        ({"cell": "gru"}, "config.cell"),
        ({"cutoffs": [1, 2.5]}, "config.cutoffs"),
        ({"gate": 3}, "config.gate"),
    ],
)
def test_bad_configs_are_refused(plain, message):
    with raises_blockgate(message):
        from_plain(LanguageModelConfig, plain)


def test_bad_options_are_refused():
    with raises_blockgate("matrices: expected one of"):
        LanguageModel(replace(SMALL, matrices="sparse"), WORDS)
    with raises_blockgate("hidden_size"):
        LanguageModel(replace(SMALL, hidden_size=0), WORDS)
    with raises_blockgate("numbers of shape (time, batch)"):
        LanguageModel(SMALL, WORDS)(torch.zeros(3, dtype=torch.long))
