"""The comparisons of recurrent networks at toy size: arms, checks, reports. No test looks at how long anything took."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from blockgate.cli import main
from blockgate.lab.bench import checks, comparison, engines, language_model, recurrent, recurrent_targets
from blockgate.lab.bench.recurrent import RecurrentCase
from blockgate.lab.models import LanguageModel, LanguageModelConfig
from tests.helpers import assert_close, raises_blockgate

SMALL = RecurrentCase(hidden=32, block=16, key=16)
TRAINED = RecurrentCase(hidden=32, block=16, key=16, batch=3, steps=4)
FP32, INT8 = torch.float32, torch.int8


def names(result):
    return [arm.name for arm in result.arms]


def test_ratios_are_to_the_fastest_rival():
    arms = [
        comparison.Arm(name="slow", call=lambda: None, rival=True),
        comparison.Arm(name="fast", call=lambda: None, rival=True),
        comparison.Arm(name="ours", call=lambda: None, floor=3.0),
    ]
    times = {"slow": 8.0, "fast": 4.0, "ours": 2.0}
    result = comparison.ComparisonResult(
        comparison=comparison.Comparison(work="w", arms=arms, left_out={"other": "not there"}),
        timings={name: comparison.Timing.of([[seconds]]) for name, seconds in times.items()},
        cold_timings={},
    )
    assert result.best_rival == "fast"
    assert result.speedup("ours") == 2.0
    assert not result.met
    text = comparison.comparison_markdown(result)
    assert "**2.00x**" in text, "a missed floor stands out"
    assert "Not measured: other (not there)." in text
    assert json.loads(json.dumps(result.to_dict()))["arms"][2]["floor"] == 3.0


@pytest.mark.parametrize("build", [recurrent.cell_decode, recurrent.qrnn_decode])
def test_decoding_has_every_type_and_sparsity(build):
    compared = build(SMALL, {FP32: {0.5: 1.8, 0.9: None}, INT8: {0.5: 5, 0.9: 13}})
    ours = [name for name in names(compared) if name.startswith("blockgate")]
    dense = ["blockgate fp32, dense", "blockgate int8, dense"]
    assert ours == [*dense, "blockgate fp32 50%", "blockgate int8 50%", "blockgate fp32 90%", "blockgate int8 90%"]
    assert not any(arm.rival for arm in compared.arms if arm.name in dense)
    result = comparison.run_comparison(compared, seconds=0.001)
    assert result.timings.keys() == set(names(compared))


@pytest.mark.parametrize("build", [recurrent.cell_training, recurrent.qrnn_training])
def test_training_runs_every_arm(build):
    compared = build(TRAINED, {0.5: 1.2, 0.9: 2.5})
    for arm in compared.arms:
        arm.call()
    assert names(compared)[-2:] == ["blockgate 50%", "blockgate 90%"]


@pytest.mark.filterwarnings("ignore")  # torch announces the end of its quantisation
@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_the_cell_says_which_network_is_meant(cell):
    decoded = recurrent.cell_decode(replace(SMALL, cell=cell), {FP32: {0.5: None}})
    trained = recurrent.cell_training(replace(TRAINED, cell=cell), {0.5: None})
    for compared in (decoded, trained):
        assert compared.work.startswith(f"{cell}, ")
        assert names(compared)[:3] == [f"nn.{cell}", f"nn.{cell} without oneDNN", f"nn.{cell}Cell loop"]
        with torch.set_grad_enabled(compared.training):
            for arm in compared.arms:
                arm.call()
    assert ("torch int8 dynamic" in names(decoded)) == (cell == "GRU")
    assert type(SMALL.gated(nn.LSTM(32, 32), 0.5)).__name__ == "DynamicSparseLSTM"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_both_directions_read_whole_sequences(cell):
    compared = recurrent.cell_decode(replace(TRAINED, cell=cell, both=True, layers=1), {FP32: {0.5: None}})
    assert compared.work.startswith(f"{cell}, both ways, ")
    assert f"nn.{cell}Cell loop" not in names(compared)
    with torch.no_grad():
        shapes = {arm.call()[0].shape for arm in compared.arms if arm.name != f"nn.{cell} without oneDNN"}
    assert shapes == {(4, 3, 64)}


def test_the_loop_over_cells_is_the_layer():
    x = torch.randn(4, 3, 5)
    lstm, gru = nn.LSTM(5, 6, 2), nn.GRU(5, 6, 2)
    y, states = recurrent._CellLoop(lstm)(x)
    want, (h, _) = lstm(x)
    assert_close(y, want)
    assert_close(torch.stack([h for h, _ in states]), h)
    y, states = recurrent._CellLoop(gru)(x)
    want, h = gru(x)
    assert_close(y, want)
    assert_close(torch.stack(states), h)


def test_engines_that_are_missing_are_named(monkeypatch):
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda _: None)
    compared = language_model.compare_language_models(SMALL, 20, {0.5: 1.35})
    engines_here = ["torch fp32", "torch int8 dynamic"]
    assert names(compared) == [*engines_here, "blockgate int8, dense", "blockgate int8 50%, dense decoder"]
    assert "onnx is not installed" in compared.left_out["ONNX Runtime int8"]
    assert comparison.run_comparison(compared, seconds=0.001).timings.keys() == set(names(compared))


def test_the_language_model_is_that_of_the_laboratory_with_gates_in_its_stack():
    model = language_model.dense_model(SMALL, 20)
    assert isinstance(model, LanguageModel)
    assert model.is_one_stack
    packed = language_model._packed(model, 0.5, SMALL, torch.zeros(1, 1, dtype=torch.long))
    assert type(packed.layers[0]).__name__ == "PackedLSTM"
    assert packed.layers[0].num_layers == SMALL.layers


@pytest.mark.filterwarnings("ignore")  # torch's exporter and the engines warn of each other
@pytest.mark.parametrize("engine", ["ONNX Runtime fp32", "OpenVINO fp32"])
def test_engines_compute_the_same_model(engine):
    pytest.importorskip("onnx")
    pytest.importorskip({"O": "onnxruntime", "V": "openvino"}["V" if "VINO" in engine else "O"])
    case = RecurrentCase(hidden=32, steps=3)
    model, words = language_model.dense_model(case, 20), torch.arange(3)[:, None]
    step = engines.engines(words)[engine](model)
    found = expected = None
    with torch.no_grad():
        for _ in range(2):
            (got, found), (want, expected) = step(words, found), model(words, expected)
            torch.testing.assert_close(torch.as_tensor(got), want, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_onnx_runtime_in_int8_runs_a_model_whose_embedding_is_its_output_layer(caplog):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    config = LanguageModelConfig(embedding_size=24, hidden_size=32, num_layers=1, projection=True, tied=True)
    model, words = LanguageModel(config, 20).eval().requires_grad_(False), torch.arange(3)[:, None]
    got, _ = engines.engines(words)["ONNX Runtime int8"](model)(words, None)
    assert checks.relative_error(torch.as_tensor(got), model(words)[0]) < 0.1
    assert not caplog.records


def test_a_wrong_result_is_never_timed():
    with raises_blockgate("No speed is reported"):
        checks.require_close(torch.zeros(3), torch.ones(3), "this")
    with raises_blockgate("No speed is reported"):
        checks.require_close(torch.tensor([float("nan")]), torch.ones(1), "this")


def test_the_command_writes_its_report(tmp_path, monkeypatch, capsys):
    planned = recurrent_targets.Planned("small", lambda: recurrent.cell_training(TRAINED, {0.5: 1.0}), cold=True)
    monkeypatch.setitem(recurrent_targets.RECURRENT_COMPARISONS, "lstm", (planned,))
    assert main(["bench", "lstm", "--seconds", "0.001", "--output", str(tmp_path / "r")]) == 0
    assert "| blockgate 50% |" in (tmp_path / "r.md").read_text()
    assert json.loads((tmp_path / "r.json").read_text())["results"][0]["best_rival"].startswith("nn.LSTM")
    assert main(["bench", "lstm", "--only", "nothing"]) == 2
    assert "a part of one of ['small']" in capsys.readouterr().err
