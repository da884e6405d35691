"""The screened top k: equal to the last bit to sorting all exact scores, whatever the weights and inputs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from blockgate.ops import native
from blockgate.ops.screened_topk import (
    count_survivors,
    make_screen,
    prepare_screened,
    release_screened,
    run_screened_topk,
    screened_rank,
    screened_topk,
)
from blockgate.ops.screened_topk.reference import exact_scores
from blockgate.ops.screened_topk.screen import held_rows

needs_kernels = pytest.mark.skipif(native.unavailable_reason() is not None, reason="native kernels are not built")
reference_topk = torch.ops.blockgate.screened_topk_reference
reference_rank = torch.ops.blockgate.screened_rank_reference

SHAPES = [(1, 1), (5, 1), (16, 32), (33, 7), (100, 40), (257, 33), (300, 96)]


def check(x, weight, bias, ks=(1, 3, 40)):
    """The top k and ranks of every row of x, against the reference, bit by bit."""
    screen = make_screen(weight, bias)
    for k in {min(k, len(weight)) for k in ks}:
        found, expected = (op(x, weight, bias, *screen, k) for op in (screened_topk, reference_topk))
        torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0, equal_nan=True)
    targets = torch.randint(len(weight), (len(x),))
    ranks = [op(x, targets, weight, bias, *screen) for op in (screened_rank, reference_rank)]
    torch.testing.assert_close(*ranks, rtol=0, atol=0)


def test_the_reference_by_hand():
    weight = torch.tensor([[1.0, 2.0], [3.0, -1.0], [1.0, 2.0], [0.0, 0.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 4.0])
    x = torch.tensor([[1.0, 1.0], [torch.nan, 0.0]])
    screen = make_screen(weight, bias)
    values, indices = reference_topk(x, weight, bias, *screen, 3)
    assert values[0].tolist() == [4.0, 3.0, 3.0]
    assert indices.tolist() == [[3, 0, 2], [0, 1, 2]]
    assert values[1].isnan().all()
    assert reference_rank(x, torch.tensor([2, 1]), weight, bias, *screen).tolist() == [2, 4]


@pytest.mark.parametrize("depth", [1, 15, 16, 33])
def test_exact_scores_are_the_product_rounded_once(depth):
    x, weight, bias = torch.randn(5, depth), torch.randn(9, depth), torch.randn(9)
    scores = exact_scores(x, weight, bias)
    for i in range(5):
        for j in range(9):
            terms = [float(a) * float(b) for a, b in zip(x[i], weight[j], strict=True)]
            total = math.fsum([*terms, float(bias[j])])
            assert abs(float(scores[i, j]) - total) <= 2**-23 * abs(total) + 1e-12


@pytest.mark.parametrize("shape", SHAPES)
def test_a_screen_knows_what_it_misses(shape):
    weight = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]
    screen = make_screen(weight, None)
    held = held_rows(screen, weight)
    missed, norm = (screen.rows[:, place].flatten()[: len(weight)].double() for place in (1, 2))
    actual = (weight.double() - held).norm(dim=1)
    assert (actual <= missed).all()
    assert (missed <= actual * (1 + 1e-5) + 1e-30).all()
    assert (held.norm(dim=1) <= norm).all()
    assert actual.norm() < 0.15 * weight.double().norm()
    assert screen.rows[:, 1].flatten()[len(weight) :].isinf().all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_random_layers(shape, with_bias):
    torch.manual_seed(0)
    bias = torch.randn(shape[0]) if with_bias else None
    check(torch.randn(20, shape[1]), torch.randn(shape), bias, ks=(1, 3, 40, shape[0]))


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-20, 1.0, 1e15, 1e18, 1e19, 3e19, 1e30, 3e38])
@pytest.mark.parametrize("other", [1e-44, 1.0, 1e19])
def test_tiny_and_huge_numbers(scale, other):
    torch.manual_seed(1)
    weight, x = torch.randn(200, 50).clamp(-1, 1) * scale, torch.randn(8, 50).clamp(-1, 1) * other
    check(x, weight, None)
    check(x, weight, torch.randn(200) * min(scale * other, 3e38) if scale * other < math.inf else torch.zeros(200))


def test_rows_and_inputs_of_different_scales():
    torch.manual_seed(2)
    weight = torch.randn(400, 70) * torch.logspace(-20, 18, 400)[torch.randperm(400), None]
    check(torch.randn(8, 70), weight, torch.randn(400))
    check(torch.randn(8, 70) * torch.logspace(-20, 15, 70)[torch.randperm(70)], weight, None)
    check(torch.randn(8, 70) * torch.logspace(-9, 9, 70), torch.randn(400, 70) * torch.logspace(9, -9, 70), None)


def test_ties_and_near_ties():
    torch.manual_seed(3)
    row = torch.randn(64)
    same = row.repeat(300, 1)
    check(torch.randn(8, 64), same, None)
    near = same.clone()
    near[torch.arange(300), torch.randint(64, (300,))] *= 1 + 2**-22
    check(torch.randn(30, 64), near, None)
    check(torch.randn(30, 64), near, torch.randn(300) * 1e-7)
    few = torch.randint(-1, 2, (300, 64)).float()
    check(torch.randint(-1, 2, (30, 64)).float(), few, torch.randint(-1, 2, (300,)).float())
    check(torch.zeros(2, 64), few, None)
    check(torch.randn(2, 64), torch.zeros(300, 64), None)
    check(-torch.rand(4, 64), torch.rand(300, 64), None)


def test_nan_and_inf():
    torch.manual_seed(4)
    x = torch.randn(4, 40)
    x[0, 39], x[1, 3], x[2, 0] = torch.nan, torch.inf, -torch.inf
    bias = torch.randn(100)
    check(x, torch.randn(100, 40), bias)
    bias[:40] = -torch.inf
    check(x, torch.randn(100, 40), bias)
    bias[70] = torch.inf
    check(x, torch.randn(100, 40), bias)


@pytest.mark.parametrize("width", [32, 70])
def test_inputs_chosen_against_the_bound(width):
    """The largest error that a bound allows: the input points where the codes of a row miss most of it."""
    torch.manual_seed(5)
    weight = torch.randn(256, width)
    screen = make_screen(weight, None)
    held = held_rows(screen, weight)
    missed = weight.double() - held
    rows = torch.randint(256, (5,))
    x = (missed[rows] / missed[rows].norm(dim=1, keepdim=True)).float()
    # The row's rivals, one by one, get a bias that leaves them just below it: the scan alone puts them first.
    scores = exact_scores(x, weight, None).double()
    for share in (0.999999, 0.9):
        for row, x_row, score in zip(rows.tolist(), x, scores, strict=True):
            gap = float(missed[row].norm()) * share
            bias = (score[row] - score - gap * 1e-3).float()
            bias[row] = 0
            own = make_screen(weight, bias)
            assert screened_topk(x_row[None], weight, bias, *own, 1)[1].item() == row
            assert screened_rank(x_row[None], torch.tensor([row]), weight, bias, *own).item() == 0


def test_inputs_that_rounding_hits_hardest():
    """Steps of x are missed by half, all in the direction that a row holds."""
    torch.manual_seed(6)
    weight = torch.randint(-7, 8, (256, 64)).float()
    weight[:, ::32] = 7.5
    x = torch.sign(weight[17]) * 40.49
    x[::32] = 127
    check(x[None], weight, None)
    scores = exact_scores(x[None], weight, None)[0]
    for gap in (1e-3, 1.0, 30.0, 100.0):
        bias = scores[17] - scores - gap
        bias[17] = 0
        check(x[None], weight, bias, ks=(1, 2))


@needs_kernels
def test_many_random_cases(monkeypatch):
    """Many thousand tokens, in layers of every kind; `benchmarks/screened_certificate.py` takes millions."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from screened_certificate import kinds_of_layers, misses

    generator = torch.Generator().manual_seed(7)
    for kind in kinds_of_layers():
        assert misses(kind, tokens=1000, generator=generator) == 0, kind


@needs_kernels
def test_few_rows_survive_in_a_layer_with_clear_winners():
    torch.manual_seed(8)
    weight = torch.randn(4000, 128)
    x = weight[::100] + 0.1 * torch.randn(40, 128)
    handle = prepare_screened(weight, None, *make_screen(weight, None))
    assert count_survivors(x, handle, 1).max() <= 3
    assert (count_survivors(torch.randn(40, 128), handle, 1) > 1).all()
    assert (count_survivors(x, handle, 2000) == 4000).all()
    values, indices = run_screened_topk(x, handle, 1)
    assert indices.flatten().tolist() == list(range(0, 4000, 100))
    assert values.shape == (40, 1)
    release_screened(handle)
    with pytest.raises(RuntimeError, match="handle: expected a prepared output layer, got"):
        run_screened_topk(x, handle, 1)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        torch.manual_seed(9)
        check(torch.randn(2, 256), torch.randn(2000, 256), torch.randn(2000))
    finally:
        torch.set_num_threads(before)


def test_opcheck():
    weight, x = torch.randn(40, 20), torch.randn(3, 20)
    layer = (weight, torch.randn(40), *make_screen(weight, None))
    targets = torch.tensor([0, 39, 7])
    for variant in ("", "_reference"):
        torch.library.opcheck(getattr(torch.ops.blockgate, f"screened_topk{variant}"), (x, *layer, 3))
        torch.library.opcheck(getattr(torch.ops.blockgate, f"screened_rank{variant}"), (x, targets, *layer))


@needs_kernels
def test_wrong_tensors_are_errors():
    weight, x = torch.randn(40, 20), torch.randn(3, 20)
    codes, steps, rows = make_screen(weight, None)
    for layer, k, message in [
        ((weight, None, codes, steps, rows), 41, r"k: expected 1 to 40 \(rows of the weight\), got 41"),
        ((weight, None, codes, steps, rows), 0, "k: expected 1 to 40"),
        ((weight[:20], None, codes, steps, rows), 1, "codes: expected size 2 in dimension 0"),
        ((weight, torch.randn(3), codes, steps, rows), 1, "bias: expected size 40 in dimension 0"),
        ((weight, None, codes.float(), steps, rows), 1, "codes: expected dtype Byte, got Float"),
        ((weight, None, codes, steps[..., :8], rows), 1, "steps: expected size 16 in dimension 2"),
        ((weight, None, codes, steps, rows[:, :3]), 1, "rows: expected size 4 in dimension 1"),
        ((weight.double(), None, codes, steps, rows), 1, "weight: expected dtype Float, got Double"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            screened_topk(x, *layer, k)
    with pytest.raises(RuntimeError, match="x: expected size 20 in dimension 1"):
        screened_topk(x[:, :19], weight, None, codes, steps, rows, 1)
    with pytest.raises(RuntimeError, match="targets: expected rows from 0 to 39, got 40"):
        screened_rank(x, torch.tensor([0, 1, 40]), weight, None, codes, steps, rows)


@needs_kernels
@pytest.mark.parametrize("k", [-(2**63), -1, 0, 41, 2**61, 2**61 + 1, 2**62 + 1, 2**63 - 1])
@pytest.mark.parametrize("count", [0, 3])
def test_an_absurd_k_is_refused_before_memory_is_asked_for(k, count):
    weight, x = torch.randn(40, 20), torch.randn(count, 20)
    layer = (weight, None, *make_screen(weight, None))
    handle = prepare_screened(*layer)
    try:
        for call in (
            lambda: count_survivors(x, handle, k),
            lambda: run_screened_topk(x, handle, k),
            lambda: screened_topk(x, *layer, k),
        ):
            with pytest.raises(RuntimeError, match=r"k: expected 1 to 40 \(rows of the weight\), got"):
                call()
    finally:
        release_screened(handle)
