"""The experiments of a published size: arms, two seeds where the claims stand, dropouts, averages; at tiny scale."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from blockgate.lab.models import LanguageModel, count_costs
from blockgate.lab.reproduce import Arm, Order, arms_of, reproduce, run_of
from blockgate.lab.reproduce.report import table
from blockgate.lab.training import shipped_configs
from blockgate.lab.training.launch import check_run
from tests.helpers import raises_blockgate
from tests.lab.reproduce.test_report import result


def names(experiment, scale="laptop"):
    return [arm.name for arm in arms_of(experiment, scale)]


def test_the_arms_of_a_published_size():
    kinds = ["dense", "margin-50", "margin-75", "margin-90", "mask-50", "mask-90", "agp-90"]
    ptb = [*kinds, "small-margin-75", "small-margin-90"]
    wikitext = ["dense", "margin-50", "margin-90"]
    assert names("medium") == [f"ptb-medium-{a}" for a in ptb] + [f"wikitext-2-medium-{a}" for a in wikitext]
    assert names("medium", "paper") == [f"ptb-lstm-{a}" for a in ptb] + [f"wikitext-2-lstm-{a}" for a in wikitext]
    qrnn = ["dense", *(f"margin-{p}" for p in (50, 60, 80, 90)), *(f"small-margin-{p}" for p in (60, 80, 90))]
    assert names("medium-qrnn") == [f"ptb-qrnn-medium-{arm}" for arm in qrnn]
    assert names("medium-qrnn", "paper") == [f"ptb-qrnn-{arm}" for arm in qrnn]


def test_the_models_have_the_published_sizes():
    configs = shipped_configs()
    for name in ("ptb-medium-laptop", "wikitext-2-medium-laptop"):
        model = configs[name].model
        assert (model.cell, model.num_layers, model.embedding_size, model.hidden_size) == ("lstm", 2, 650, 650)
    run = configs["ptb-qrnn-medium-laptop"]
    assert (run.model.cell, run.model.num_layers, run.model.windows) == ("qrnn", 4, (2, 1))
    assert min(run.activation_l2, run.slowness, run.model.weight_dropout, run.model.word_dropout) > 0


@pytest.mark.parametrize(("task", "percent"), [("ptb-medium", 75), ("ptb-medium", 90), ("ptb-qrnn-medium", 60)])
def test_small_models_cost_no_less_than_the_margin_model(task, percent):
    base = shipped_configs()[f"{task}-laptop"]

    def macs(kind, **changes):
        run = run_of(Arm(task, kind, percent), base, 10000)
        return count_costs(LanguageModel(replace(run.model, **changes), 10000)).macs

    model = run_of(Arm(task, "small-margin", percent), base, 10000).model
    narrower = {"hidden_size": model.hidden_size - 1}
    if model.embedding_size == model.hidden_size:
        narrower["embedding_size"] = model.embedding_size - 1
    assert macs("small-margin", **narrower) < macs("margin") <= macs("small-margin")


def results_in(folder):
    return {
        str(file.parent.relative_to(folder)): json.loads(file.read_text()) for file in folder.glob("*/*/result.json")
    }


@pytest.mark.slow
def test_claims_have_two_seeds_and_kinds_their_own_dropout(tmp_path):
    arms = ("ptb-medium-dense", "ptb-medium-margin-50", "ptb-medium-mask-90", "wikitext-2-medium-margin-90")
    order = Order(
        experiment="medium",
        scale="tiny",
        arms=arms,
        dropout={"dense": 0.2, "margin": 0.1},
        average_from=2.5,
        levels=(40, 38),
        output=tmp_path,
    )
    text = reproduce(order).read_text()
    results = results_in(tmp_path / "tiny")
    seeds = {arms[0]: 2, arms[1]: 2, arms[2]: 1, arms[3]: 1}
    assert set(results) == {f"{arm}/seed-{seed}" for arm, count in seeds.items() for seed in range(1, count + 1)}
    dropouts = {name: one["run"]["model"]["dropout"] for name, one in results.items()}
    assert dropouts[f"{arms[0]}/seed-2"] == 0.2
    assert dropouts[f"{arms[1]}/seed-1"] == dropouts[f"{arms[3]}/seed-1"] == 0.1
    assert dropouts[f"{arms[2]}/seed-1"] == shipped_configs()["ptb-medium-laptop"].model.dropout
    assert all(one["run"]["optimizer"]["average_from"] == 2.5 for one in results.values())
    assert "- Dropout, ptb-medium: dense 0.2, margin, revived, thin blocks 0.1, static mask by magnitude 0.4.\n" in text
    assert "| to 40 | to 38 |" in text
    assert (tmp_path / "tiny" / "pace-medium-wikitext-2-medium.png").is_file()


@pytest.mark.slow
def test_the_quasi_rnn_of_four_layers_trains_with_gates_and_without(tmp_path):
    arms = ("ptb-qrnn-medium-margin-60", "ptb-qrnn-medium-small-margin-60")
    text = reproduce(Order(experiment="medium-qrnn", scale="tiny", arms=arms, output=tmp_path)).read_text()
    results = results_in(tmp_path / "tiny")
    assert set(results) == {f"{arm}/seed-1" for arm in arms}
    assert all(len(one["gates"]) == (4 if "small" not in name else 0) for name, one in results.items())
    assert "| to 110 | to 100 | to 95 |" in text


def test_dropouts_are_named_only_where_they_differ():
    arms = [Arm("ptb-medium", "dense"), Arm("ptb-medium", "margin", 50)]
    results = {arm.name: [result(1, 1.0, 1.0, macs=1, layers=1, dense_layers=1)] for arm in arms}
    assert "Dropout" not in table("", arms, results, "laptop")
    results[arms[0].name][0]["run"]["model"] = {"dropout": 0.5}
    assert "- Dropout, ptb-medium: dense 0.5, margin, revived, thin blocks 0.\n" in table("", arms, results, "laptop")


@pytest.mark.parametrize("dropout", [{"agp": 1.0}, {"dynamic": 0.1}, {"margin": -0.1}, {"margin": float("nan")}])
def test_wrong_dropouts_are_refused(dropout, tmp_path):
    with raises_blockgate("--dropout: expected shares in [0, 1) of the kinds dense, margin, mask, agp, small-margin"):
        reproduce(Order(experiment="medium", scale="tiny", dropout=dropout, output=tmp_path))
    with raises_blockgate("--dropout: expected shares"):
        reproduce(Order(experiment="mnist", scale="tiny", dropout={"dense": 0.1}, output=tmp_path))


@pytest.mark.parametrize("begin", [1.0, 12.0, float("nan")])
def test_averages_begin_after_ramps_and_before_the_end(begin, tmp_path):
    run = shipped_configs()["ptb-medium-laptop"]
    run = replace(run, output=tmp_path, optimizer=replace(run.optimizer, average_from=begin))
    with raises_blockgate("optimizer.average_from: expected "):
        check_run(run)
