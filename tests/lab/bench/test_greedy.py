"""The comparison of greedy decoding at toy size. No test looks at how long anything took."""

from __future__ import annotations

import json

import pytest
import torch

import blockgate as bg
from blockgate.inspect.timing import Timing
from blockgate.lab.bench import comparison, engines, greedy, language_model
from blockgate.lab.bench.recurrent import RecurrentCase
from tests.helpers import raises_blockgate

SMALL = RecurrentCase(hidden=32, block=16, key=16)


@pytest.fixture
def no_other_engines(monkeypatch):
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda _: None)


@pytest.mark.usefixtures("no_other_engines")
def test_every_arm_finds_the_likeliest_word_and_tells_what_it_reads():
    floors = {"dense": {0.5: 1.35}, "screened": {0.5: 1.6, 0.9: None}}
    compared = greedy.compare_greedy(SMALL, 40, floors)
    assert [arm.name for arm in compared.arms] == [
        "torch fp32",
        "torch int8 dynamic",
        "blockgate int8, dense",
        "blockgate int8 50%, dense output layer",
        "blockgate int8 50%, screened output layer",
        "blockgate int8 90%, screened output layer",
    ]
    assert all(arm.call().shape == (1, 1) for arm in compared.arms)
    fp32, int8, packed, *ours = (arm.read for arm in compared.arms)
    assert fp32 == 4 * int8
    assert int8 < packed < fp32  # with scales and biases
    assert packed > ours[0]
    assert ours[1] > ours[2]
    assert "words survive the screening" in compared.remarks[0]


@pytest.mark.usefixtures("no_other_engines")
def test_a_screened_model_that_finds_other_words_is_never_timed(monkeypatch):
    def wrong(self, x, k):
        return self.forward(x).topk(k, largest=False)

    monkeypatch.setattr("blockgate.runtime.screened.ScreenedLinear.topk", wrong)
    with raises_blockgate("expected the likeliest words at 50% before timing"):
        greedy.compare_greedy(SMALL, 40, {"dense": {}, "screened": {0.5: None}})


def test_bytes_are_those_of_open_blocks_gates_and_the_scan():
    layer = bg.DynamicSparseLinear(64, 64, block_size=16, key_size=16, sparsity=0.5, bias=False)
    model = bg.pack(torch.nn.Sequential(layer, torch.nn.Linear(64, 160)), "int8", screened="1")
    gate = sum(p.numel() for p in layer.gate.parameters()) * 4
    scan = 10 * (2 * 272 + 256)
    assert greedy.read_bytes(model, 3) == 64 * 64 / 2 + 16 * 16 * 4 / 2 + gate + scan + 3 * 64 * 4


def test_shares_of_bandwidth_are_reported():
    arms = [
        comparison.Arm(name="rival", call=lambda: None, rival=True, read=8_000_000),
        comparison.Arm(name="ours", call=lambda: None, read=2_000_000),
    ]
    times = {"rival": Timing.of([[1e-3]]), "ours": Timing.of([[5e-4]])}
    result = comparison.ComparisonResult(
        comparison=comparison.Comparison(work="w", arms=arms, remarks=("Mind this.",)),
        timings=times,
        cold_timings=times,
        read_bandwidth=16e9,
    )
    text = comparison.comparison_markdown(result)
    assert "| 8.0 | 50% |" in text
    assert "| 2.0 | 25% |" in text
    assert "16.0 GB/s" in text
    assert "Mind this." in text
    assert json.loads(json.dumps(result.to_dict()))["arms"][1]["share_of_read_bandwidth"] == 0.25


def test_read_bandwidth_is_measured_where_bytes_are_known():
    arms = [comparison.Arm(name="rival", call=lambda: None, rival=True, read=1)]
    result = comparison.run_comparison(comparison.Comparison(work="w", arms=arms), seconds=1e-4, cold=True)
    assert result.read_bandwidth > 1e8


@pytest.mark.filterwarnings("ignore")  # torch's exporter and the engines warn of each other
@pytest.mark.parametrize("engine", ["torch int8 dynamic", "ONNX Runtime fp32", "OpenVINO fp32", "OpenVINO int8"])
def test_engines_find_the_same_words(engine):
    if "torch" not in engine:
        pytest.importorskip("onnx")
        pytest.importorskip("onnxruntime" if "ONNX" in engine else "openvino")
    torch.manual_seed(0)
    model = language_model.dense_model(SMALL, 20)
    texts = language_model.random_words(SMALL, 20)
    greedy.spread_scores_(model.requires_grad_(False), texts, deviation=5.0)
    step, plain = engines.engines(texts[0], greedy=True)[engine](model), engines.greedy_step(model)
    found = expected = None
    with torch.no_grad():
        for words in texts[:4]:
            (got, found), (want, expected) = step(words, found), plain(words, expected)
            assert torch.as_tensor(got).tolist() == want.tolist()
