"""The likeliest words of a packed adaptive softmax in one call: those of computing everything."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

import blockgate as bg
from blockgate.formats import FORMATS
from blockgate.lab.models import LanguageModel, LanguageModelConfig
from blockgate.layers import AdaptiveSoftmax
from blockgate.ops import native
from blockgate.ops.packed_linear import adaptive_counts, run_prepared_adaptive
from tests.helpers import raises_blockgate

pytestmark = pytest.mark.skipif(native.unavailable_reason() is not None, reason="native kernels are not built")

WORDS, FEATURES, CUTOFFS = 700, 40, (100, 300, 301)


@pytest.fixture
def softmax():
    torch.manual_seed(0)
    made = AdaptiveSoftmax(FEATURES, WORDS, CUTOFFS)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made.eval()


def by_formula(packed, x):
    """Every word's value (N, words) in float64, from the scores that the packed decoder computes."""
    scores = packed.decoder(x).double()
    groups = x.double() @ packed.group_weight.double().t() + packed.group_bias.double()
    spans = list(itertools.pairwise(packed.bounds))
    rare = [g[:, None] + scores[:, a:b].log_softmax(1) for g, (a, b) in zip(groups.t(), spans, strict=True)]
    return torch.cat([scores[:, : packed.bounds[0]], *rare], dim=1)


@torch.inference_mode()
def check(packed, x, k, *, exact=False):
    """The k likeliest words against sorting all of them; `exact`: to the last bit, ties by rising number."""
    values, words = packed.likeliest(x, k)
    expected = by_formula(packed, x)
    ordered = expected.sort(dim=1, descending=True, stable=True)
    rounding = 0.0 if exact else 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(values.double(), ordered.values[:, :k], rtol=0, atol=rounding)
    torch.testing.assert_close(expected.gather(1, words), ordered.values[:, :k], rtol=0, atol=rounding)
    assert all(len(set(row)) == k for row in words.tolist())
    if exact:
        assert words.tolist() == ordered.indices[:, :k].tolist()


def computed_groups(packed):
    return adaptive_counts(packed.decoder.prepared().handle)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("k", [1, 7, 150, WORDS])
def test_random_layers(softmax, name, k):
    packed = bg.pack(softmax, name)
    # Groups that always win, that never do, and all between.
    for shift in (-30.0, -3.0, 0.0, 3.0, 30.0):
        with torch.no_grad():
            packed.group_bias.copy_(softmax.group_bias + shift)
        check(packed, torch.randn(12, FEATURES), k)


def test_groups_that_cannot_win_are_left_out(softmax):
    packed, x = bg.pack(softmax, "int8"), torch.randn(50, FEATURES)
    best = packed.decoder(x)[:, : CUTOFFS[0]].max(dim=1).values
    groups = x @ packed.group_weight.t() + packed.group_bias
    check(packed, x, 1)
    rows, computed = computed_groups(packed)
    assert rows == 50
    # A group below the best frequent word is never computed; one above it may be, if no other has won before.
    assert 0 < computed <= int((groups >= best[:, None]).sum()) < 50 * len(CUTOFFS)
    with torch.no_grad():
        packed.group_bias.fill_(-1e3)
    check(packed, x, CUTOFFS[0])
    assert computed_groups(packed) == (100, computed)
    check(packed, x, CUTOFFS[0] + 1)
    assert computed_groups(packed)[1] > computed


def test_ties():
    """Whole numbers: words that tie with each other, with those of other groups, and with a group of one word."""
    torch.manual_seed(1)
    softmax = AdaptiveSoftmax(FEATURES, 340, (100, 300, 301)).eval()
    with torch.no_grad():
        for parameter in softmax.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape))
        # One word has all of its group's probability: it is worth just what the group is.
        softmax.decoder.bias[150] = softmax.decoder.bias[320] = 500.0
        softmax.group_weight.copy_(softmax.decoder.weight[:3])
        softmax.group_bias.copy_(softmax.decoder.bias[:3])
    packed = bg.pack(softmax)
    x = torch.randint(-2, 3, (60, FEATURES)).float()
    for k in (1, 3, 20):
        check(packed, x, k, exact=True)
    with torch.no_grad():
        packed.group_weight.copy_(softmax.decoder.weight[:1])
        packed.group_bias.copy_(softmax.decoder.bias[:1])
    for k in (1, 3, 20):
        check(packed, x, k, exact=True)


def test_equal_words_of_a_rare_group_come_by_number(softmax):
    with torch.no_grad():
        softmax.decoder.weight[400:450] = softmax.decoder.weight[400]
        softmax.decoder.bias[400:450] = 40.0
        softmax.group_bias[2:] = 100.0
    words = bg.pack(softmax).likeliest(torch.randn(5, FEATURES), 20)[1]
    assert words.tolist() == [list(range(400, 420))] * 5


def test_nan_and_inf(softmax):
    packed, x = bg.pack(softmax, "int8"), torch.randn(3, FEATURES)
    expected = packed.likeliest(x, 4)
    x[1, 5] = torch.inf
    values, words = packed.likeliest(x, 4)
    assert values[1].isnan().all()
    assert words[1].tolist() == [0, 1, 2, 3]
    for found, wanted in zip((values, words), expected, strict=True):
        torch.testing.assert_close(found[::2], wanted[::2], rtol=0, atol=0)
    with torch.no_grad():
        packed.group_weight[1, 0] = torch.nan
    assert packed.likeliest(x, 4)[0].isnan().all()


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_and_rows_give_the_same_bits(softmax, threads):
    packed, x = bg.pack(softmax, "int8"), torch.randn(9, FEATURES)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = packed.likeliest(x, 5)
    finally:
        torch.set_num_threads(before)
    alone = [torch.cat(part) for part in zip(*(packed.likeliest(row, 5) for row in x.split(1)), strict=True)]
    torch.testing.assert_close(together, tuple(alone), rtol=0, atol=0)


def test_language_models_use_it_and_explain_tells():
    torch.manual_seed(2)
    config = LanguageModelConfig(embedding_size=24, hidden_size=24, cutoffs=(100, 300))
    model = LanguageModel(config, WORDS).eval()
    packed = bg.pack(model)
    words = torch.randint(WORDS, (3, 4))
    with torch.inference_mode():
        scores, numbers, _ = packed.likeliest(words, k=6)
        expected = model(words)[0][-1].topk(6)
        found = (scores - scores.logsumexp(1, keepdim=True), numbers)
        wanted = (expected.values - expected.values.logsumexp(1, keepdim=True), expected.indices)
        torch.testing.assert_close(found, wanted)
        (row,) = [row for row in bg.explain(packed, words[:1]).layers if row.layer == "softmax.decoder"]
    assert computed_groups(packed.softmax)[0] == 4
    assert "groups of rare words computed for a row" in row.figures
    assert packed.softmax.bounds == [100, 300, WORDS]


@pytest.mark.parametrize("change", ["hook", "gate", "float64", "unpacked"])
def test_what_no_single_call_can_do_is_computed_whole(softmax, change):
    x = torch.randn(4, FEATURES)
    if change == "gate":
        bg.sparsify_(softmax, block_size=16, filter_fn=lambda _, name: name == "decoder")
    packed = softmax if change == "unpacked" else bg.pack(softmax)
    if change == "hook":
        packed.decoder.register_forward_hook(lambda _, __, scores: -scores)
    if change == "float64":
        x = x.double()
        packed.group_weight.data, packed.group_bias.data = packed.group_weight.double(), packed.group_bias.double()
    with torch.inference_mode():
        torch.testing.assert_close(packed.likeliest(x, 5), tuple(packed(x).topk(5)))


def test_copies_and_checkpoints(softmax):
    packed, other = bg.pack(softmax, "int8"), bg.pack(AdaptiveSoftmax(FEATURES, WORDS, CUTOFFS), "int8")
    x = torch.randn(4, FEATURES)
    other.load_state_dict(packed.state_dict())
    for copied in (copy.deepcopy(packed), other):
        torch.testing.assert_close(copied.likeliest(x, 3), packed.likeliest(x, 3), rtol=0, atol=0)


def test_bad_arguments(softmax):
    packed, x = bg.pack(softmax), torch.randn(2, FEATURES)
    handle, groups = packed.decoder.prepared().handle, (packed.group_weight, packed.group_bias)
    for bounds, message in (
        ([100, 300, 300, WORDS], "rising"),
        ([100, 300, 301, 600], "the number of words"),
        ([100, 300, WORDS], "expected size 2"),
        ([WORDS], "at least 2"),
    ):
        with pytest.raises(RuntimeError, match=message):
            run_prepared_adaptive(x, handle, *groups, bounds, 1)
    for k in (0, WORDS + 1):
        with pytest.raises(RuntimeError, match="k: expected 1 to 700"):
            run_prepared_adaptive(x, handle, *groups, packed.bounds, k)
    gated = bg.pack(bg.DynamicSparseLinear(FEATURES, WORDS, block_size=8))
    with pytest.raises(RuntimeError, match="without a gate"):
        run_prepared_adaptive(x, gated.prepared().handle, *groups, packed.bounds, 1)
    with raises_blockgate("cutoffs: expected rising numbers"):
        AdaptiveSoftmax(FEATURES, WORDS, (WORDS,))
