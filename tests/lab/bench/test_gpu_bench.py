"""The measuring of layers on a device, with the CPU in its place; and what is refused where there is no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blockgate.cli import main
from blockgate.lab.bench.gpu import GroupedLinear, gpu_markdown, grouped_fits, run_on
from blockgate.lab.bench.gpu_recurrent import GPU_WORK, GPUPlan, run_recurrent_on
from blockgate.lab.bench.linear import LinearCase, dynamic_layer
from blockgate.lab.bench.recurrent import RecurrentCase


@pytest.mark.parametrize("training", [False, True])
def test_all_arms_are_timed(training):
    case = LinearCase(out_features=64, in_features=48, batch=3, block=16, key=16, sparsities=(0.5, 0.75))
    result = run_on(case, "cpu", training=training, seconds=0.001)
    arms = [(arm, share) for arm, share in ARMS if not (training and arm == "grouped")]
    names = [f"{arm} {kind}{share}" for kind in ("fp32", "bf16") for arm, share in arms]
    assert list(result.seconds) == names
    assert all(arm["speedup"] > 0 for arm in result.to_dict()["arms"])
    assert gpu_markdown(result).count("blockgate") == 4


ARMS = (("dense", ""), *((arm, f" {share}%") for share in (50, 75) for arm in ("blockgate", "grouped")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_one_clear_line(capsys):
    assert main(["bench", "linear", "--device", "cuda"]) != 0
    assert "--device cuda: expected a GPU that torch can use, got 'none'" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["lstm", "gru", "qrnn"])
@pytest.mark.parametrize("training", [False, True])
def test_recurrent_arms_are_timed(kind, training):
    case = RecurrentCase(hidden=32, block=8, key=8, batch=2, steps=2 if training else 1)
    plan = GPUPlan(kind=kind, case=case, training=training, cold=not training)
    result = run_recurrent_on(plan, "cpu", seconds=0.001)
    assert list(result.seconds) == [f"{arm} {t}{s}" for t in ("fp32", "bf16") for arm, s in RECURRENT_ARMS]
    assert kind.upper() in gpu_markdown(result)
    assert result.to_dict()["case"]["title"] == plan.title


RECURRENT_ARMS = (("dense", ""), *(("blockgate", f" {s}%") for s in (50, 75, 90)))


def test_torchs_grouped_product_is_right_and_used_where_it_fits():
    case = LinearCase(out_features=64, in_features=48, batch=5, block=16, key=16, gate="margin")
    layer = dynamic_layer(case, 0.5)
    x = torch.randn(5, 48)
    with torch.no_grad():
        torch.testing.assert_close(GroupedLinear(layer)(x), layer(x))
    assert grouped_fits(layer)
    assert not grouped_fits(dynamic_layer(replace(case, out_features=63), 0.5))
    assert not grouped_fits(dynamic_layer(replace(case, block=3), 0.5))


def test_what_is_timed_on_a_gpu():
    titles = {what: list(work) for what, work in GPU_WORK.items()}
    assert list(titles) == ["targets", "lstm", "gru", "qrnn"]
    assert sum("evicted cache" in title for title in titles["targets"]) >= 5
    assert not any("packed" in title for title in titles["targets"])
    for what in ("lstm", "gru", "qrnn"):
        assert len(titles[what]) == 4
        assert all(what.upper() in title for title in titles[what])


def test_what_is_not_timed_on_a_gpu_is_refused(capsys):
    assert main(["bench", "contract", "--device", "cuda"]) != 0
    assert "--device cuda: expected linear, targets, lstm, gru, qrnn, got 'contract'" in capsys.readouterr().err
