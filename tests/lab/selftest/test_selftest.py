"""The library against the independent formula, and the judge against a library that errs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blockgate.gates.norm import NormGate
from blockgate.gates.topk import TopKGate
from blockgate.lab.selftest import DifferenceError, Findings, Problem, check, draw, run_campaign, simplest
from blockgate.lab.selftest.problems import BOUNDARIES, VALUES
from blockgate.layers import DynamicSparseLinear
from blockgate.ops.gated_gru import gated_gru
from blockgate.runtime import gated_recurrent, recurrent
from blockgate.runtime.packed import PackedLinear
from blockgate.runtime.packed_columns import PackedColumnLinear
from blockgate.runtime.paired import ACTIVATIONS
from blockgate.runtime.screened import ScreenedLinear

# Where the seeds of problems without boundary shapes begin.
FREE = 1000


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("first", [*range(0, len(BOUNDARIES), 32), *range(FREE, FREE + 192, 32)])
def test_the_library_agrees_with_the_formula(first):
    findings = Findings()
    for seed in range(first, first + 32):
        findings.add(check(draw(seed)))
    assert findings.comparisons > 32 * 8
    assert findings.mistrusted < 0.5 * findings.problems


@pytest.mark.parametrize(
    "problem",
    [
        Problem(inputs=40, out=48, block=(16, 8), rows=9, values="huge", dtype="float64", kind="topk", normalise="rms"),
        Problem(
            inputs=40, out=48, block=(16, 8), rows=9, hidden=8, key_offset=2, key_size=30, formats=("int8", "int4")
        ),
        Problem(inputs=600, out=20, block=(32, 600), rows=3, values="extreme", formats=("int8", "int4"), sparsity=0.0),
        Problem(inputs=200, out=130, block=(64, 24), rows=70, kind="topk", normalise="mean", threads=2),
        Problem(layer="lstm", inputs=24, out=32, block=(16, 4), rows=5, steps=4, layers=2, hidden=5, formats=("int8",)),
        Problem(
            layer="lstm", inputs=9, out=17, block=(16, 4), rows=4, steps=4, values="bad_state", formats=("float32",)
        ),
        Problem(layer="qrnn", inputs=9, out=17, block=(16, 4), rows=4, steps=3, layers=2, training=True),
        Problem(inputs=70, out=40, block=(1, 2), rows=6, kind="topk", select="global", values="whole"),
        Problem(inputs=24, out=40, block=(16, 1 << 40), rows=6, kind="norm", formats=("int8a8", "int4")),
        Problem(layer="cell", inputs=9, out=17, rows=0, training=True),
    ],
    ids=str,
)
def test_problems_that_faults_were_found_with(problem):
    for seed in range(3):
        assert check(replace(problem, seed=seed)).comparisons > 0


@pytest.mark.parametrize(
    "problem",
    [
        # Heads of a second layer choose by inputs that autocast has rounded.
        Problem(
            seed=9455, layer="qrnn", autocast="bfloat16", out=9, inputs=1, block=(2, 48), rows=6, layers=2, window=1,
            pooling="f", kind="softmax_sum", sparsity=0.99, key_size=1, hidden=5,
        ),
        Problem(
            seed=10109670, layer="qrnn", autocast="bfloat16", out=31, rows=8, steps=2, layers=2, window=1,
            kind="softmax_sum",
        ),
        # A state so near to 0 that float32 has no number for it: behind it, a ReLU is at 0 instead of a little above.
        Problem(
            seed=30105770, layer="lstm", values="whole", out=2, inputs=33, block=(32, 2), rows=8, layers=2, kind="topk",
            normalise="none", hidden=16,
        ),
        # The same in float16, between two layers: 7e-8 is 0 there.
        Problem(
            seed=30100146, layer="lstm", values="whole", dtype="float16", out=5, inputs=29, block=(33, 1), layers=2,
            bias=False, kind="norm", sparsity=0.25,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_problems_that_the_judge_was_wrong_about(problem):
    assert check(problem).comparisons > 0


DRAWN = {
    "norm gates": lambda p: p.kind == "norm" and p.layer == "linear",
    "norm gates of wide blocks": lambda p: p.kind == "norm" and p.block[1] > 1,
    "norm gates in recurrences": lambda p: p.kind == "norm" and p.is_recurrent,
    "packed columns": lambda p: p.kind == "norm" and p.block[1] == 1 and p.formats,
    "int8a8": lambda p: "int8a8" in p.formats,
    "screened layers": lambda p: p.layer == "screened",
    "bad values in Conv1D": lambda p: p.is_bad and p.layer == "conv1d",
    "bad values in Quasi-RNNs": lambda p: p.is_bad and p.layer == "qrnn",
    "half precision in recurrences": lambda p: p.is_recurrent and p.dtype in {"float16", "bfloat16"},
    "autocast to float16": lambda p: p.autocast == "float16",
    "threads in recurrences": lambda p: p.is_recurrent and p.threads > 1,
    "packed GRUs": lambda p: p.layer == "gru" and p.formats and not p.is_bad,
    "GRU cells": lambda p: p.layer == "gru_cell",
    "bad values in GRUs": lambda p: p.layer == "gru" and p.is_bad,
    "both directions, packed sequences": lambda p: p.bidirectional and p.ragged and p.layers > 1,
    "both directions, bad states": lambda p: p.bidirectional and p.values == "bad_state",
    "both directions in half precision": lambda p: p.bidirectional and p.dtype == "float16",
    "packed paired MLPs": lambda p: p.layer == "mlp" and p.formats and p.glu,
    "paired MLPs in training": lambda p: p.layer == "mlp" and p.training and not p.glu,
    "float16 blocks": lambda p: "float16" in p.formats,
    "three threads": lambda p: p.threads == 3,
}


@pytest.mark.parametrize("what", DRAWN)
def test_everything_is_drawn(what):
    assert any(DRAWN[what](draw(seed)) for seed in range(FREE, FREE + 1500))


@pytest.mark.parametrize("layer", ["linear", "lstm", "cell", "gru", "gru_cell", "mlp", "qrnn", "screened"])
def test_boundary_shapes_come_first(layer):
    drawn = [p for p in map(draw, range(len(BOUNDARIES))) if p.layer == layer]
    assert {1, 17} <= {p.out for p in drawn}
    assert layer in {"qrnn", "screened"} or 0 in {p.rows for p in drawn}


@pytest.mark.parametrize("values", VALUES)
def test_every_kind_of_values_is_drawn(values):
    assert any(draw(seed).values == values for seed in range(FREE, FREE + 800))


def test_a_wrong_product_is_noticed_and_made_simple(monkeypatch):
    """A fault far below any tolerance of our other tests."""
    right = DynamicSparseLinear.forward
    monkeypatch.setattr(DynamicSparseLinear, "forward", lambda self, x: right(self, x) * (1 + 2e-5))
    problem = Problem(inputs=33, out=20, block=(8, 8), rows=5, sparsity=0.75, bias=False, kind="topk")
    with pytest.raises(DifferenceError, match="expected"):
        check(problem)
    small = simplest(problem)
    assert small.rows == 1 or small == replace(small, rows=2)
    assert "Problem(" in str(small)
    with pytest.raises(DifferenceError):
        check(small)


def test_a_wrong_norm_is_noticed(monkeypatch):
    right = NormGate.scores
    monkeypatch.setattr(NormGate, "scores", lambda self, x: right(self, x).flip(1))
    with pytest.raises(DifferenceError, match="not the largest"):
        check(Problem(inputs=32, out=32, block=(16, 1), kind="norm", rows=4))


def test_wrong_columns_are_noticed(monkeypatch):
    right = PackedColumnLinear.forward
    monkeypatch.setattr(PackedColumnLinear, "forward", lambda self, x: right(self, x) * (1 + 2e-5))
    with pytest.raises(DifferenceError, match="packed int4"):
        check(Problem(inputs=32, out=32, block=(16, 1), kind="norm", rows=4, formats=("int4",)))


@pytest.mark.parametrize("layer", ["lstm", "gru"])
def test_a_wrong_direction_is_noticed(layer, monkeypatch):
    """Sequences that end early tell a sequence that is turned from rows that are."""
    monkeypatch.setattr(recurrent, "turned", lambda rows, *_: rows.flip(0))
    problem = Problem(layer=layer, bidirectional=True, rows=3, steps=4, ragged=True, inputs=12, out=9)
    with pytest.raises(DifferenceError):
        check(problem)


def test_a_wrong_gru_is_noticed(monkeypatch):
    """Where the last state is read, and by how much."""
    monkeypatch.setattr(
        gated_recurrent, "gated_gru", lambda sums, *rest, **options: gated_gru(sums * (1 + 2e-5), *rest, **options)
    )
    with pytest.raises(DifferenceError, match="expected"):
        check(Problem(layer="gru", inputs=12, out=9, rows=3, steps=2, kind="topk"))


@pytest.mark.parametrize("glu", [False, True])
def test_a_wrong_activation_is_noticed(glu, monkeypatch):
    """The two kinds of GELU differ by less than 0.0005."""
    monkeypatch.setitem(ACTIVATIONS, "gelu", ACTIVATIONS["gelu_tanh"])
    with pytest.raises(DifferenceError, match="expected"):
        check(Problem(layer="mlp", inputs=12, out=9, rows=3, channels=40, glu=glu))


def test_wrong_sums_behind_flat_functions_are_noticed(monkeypatch):
    """Outputs of a sigmoid far from 0 hardly move."""
    right = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: right(self, x) * (1 + 1e-5))
    with pytest.raises(DifferenceError, match="sums int4 of hh_l0"):
        check(Problem(layer="lstm", values="extreme", inputs=40, out=64, rows=3, formats=("int4",)))


@pytest.mark.parametrize("fault", ["a row", "the order", "a rank"])
def test_wrong_largest_scores_are_noticed(fault, monkeypatch):
    topk, rank = ScreenedLinear.topk, ScreenedLinear.rank

    def wrong(self, x, k):
        found = topk(self, x, min(k + 1, self.out_features))
        if fault == "the order":
            return type(found)(found.values[:, :k].flip(1), found.indices[:, :k].flip(1))
        return type(found)(found.values[:, -k:], found.indices[:, -k:])

    if fault == "a rank":
        monkeypatch.setattr(ScreenedLinear, "rank", lambda self, x, targets: rank(self, x, targets) + 1)
    else:
        monkeypatch.setattr(ScreenedLinear, "topk", wrong)
    with pytest.raises(DifferenceError):
        check(Problem(layer="screened", inputs=40, out=50, rows=4))


def test_a_wrong_choice_is_noticed(monkeypatch):
    """Gates of the wrong blocks are all right but for which they are."""
    right = TopKGate.forward

    def backwards(self, x):
        values, indices = right(self, x)
        return values, self.grid.num_blocks - 1 - indices

    monkeypatch.setattr(TopKGate, "forward", backwards)
    with pytest.raises(DifferenceError):
        check(Problem(inputs=32, out=32, kind="topk", rows=4))


def test_near_ties_are_counted_and_judged():
    findings = Findings()
    for seed in range(40):
        findings.add(
            check(Problem(seed=seed, inputs=32, out=32, block=(4, 2), rows=8, values="twins", select="global"))
        )
    assert findings.near_ties > 0


def test_a_campaign_tells_of_failures_and_of_zeros():
    def fails(problem: Problem) -> Findings:
        if problem.seed == 3:
            raise DifferenceError("y[0]: expected 1, got 2")
        return Findings(problems=1, comparisons=5)

    campaign = run_campaign(comparisons=30, judge=fails)
    assert campaign.status == "failed"
    assert "check(Problem(" in str(campaign.failures[0])
    assert campaign.to_json()["seeds"] == [0, 7]

    campaign = run_campaign(comparisons=30, judge=lambda _: Findings(problems=1, comparisons=5, mistrusted=1))
    assert campaign.status == "mistrusted"
    assert run_campaign(comparisons=30, judge=lambda _: Findings(problems=1, comparisons=5)).status == "passed"
