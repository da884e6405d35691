"""The arms are those of the paper's tables, and differ from each other in nothing but what they are named for."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from blockgate.cli import main
from blockgate.lab.models import LanguageModel, count_costs
from blockgate.lab.reproduce import EXPERIMENTS, SCALES, Arm, arms_of, choose_arms, experiments, run_of
from blockgate.lab.reproduce.experiments import PAPER
from blockgate.lab.reproduce.experiments.ablations import ABLATIONS, DENSE_CHANGES, PRUNED_CHANGES
from blockgate.lab.training import shipped_configs
from blockgate.lab.training.config import RampConfig, run_to_plain
from tests.helpers import raises_blockgate

LSTM_ARMS = [
    "dense",
    *(f"{kind}-{percent}" for kind in ("dynamic", "dynamic-best") for percent in (50, 75, 90)),
    "dynamic-slow-50",
    *(f"agp-{percent}" for percent in (50, 75, 90)),
    "block-agp-90",
    "static-50",
    *(f"small-{percent}" for percent in (50, 75, 90)),
]
NO_DROPOUT_KINDS = ("dynamic", "dynamic-best", "dynamic-slow", "agp", "margin", "small")
LSTM_ARMS_WITHOUT_DROPOUT = [
    "dense-no-dropout",
    *(f"{kind}-no-dropout-{percent}" for kind in NO_DROPOUT_KINDS for percent in (50, 75, 90)),
]


def names(experiment, scale="laptop"):
    return [arm.name for arm in arms_of(experiment, scale)]


def test_table2_is_complete():
    tasks = ("ptb-lstm", "wikitext-2-lstm")
    assert names("table2") == [f"{task}-{arm}" for task in tasks for arm in LSTM_ARMS + LSTM_ARMS_WITHOUT_DROPOUT]
    assert names("table2", "paper") == [f"{task}-{arm}" for task in tasks for arm in LSTM_ARMS]


def test_the_wide_lstm_is_that_of_the_paper_at_its_scale():
    kinds = (
        "dynamic-best",
        "agp",
        "small",
        "dynamic-best-no-dropout",
        "dynamic-slow-no-dropout",
        "margin-no-dropout",
        "small-no-dropout",
    )
    arms = ["dense", *(f"{k}-{p}" for k in kinds for p in (50, 75, 90))]
    assert sorted(names("wide")) == sorted(f"ptb-wide-{arm}" for arm in [*arms, "dense-no-dropout"])
    assert set(names("wide", "paper")) <= set(names("table2", "paper"))


def test_table1_is_complete():
    kinds = ("dynamic", "dynamic-best", "small")
    assert names("table1") == [
        "ptb-qrnn-dense",
        *(f"ptb-qrnn-{k}-{p}" for k in kinds for p in (50, 80, 90)),
        "ptb-qrnn-dense-no-dropout",
        *(
            f"ptb-qrnn-{k}-no-dropout-{p}"
            for k in ("dynamic-best", "dynamic-slow", "margin", "small")
            for p in (50, 80, 90)
        ),
    ]
    assert names("table1", "paper") == [
        "ptb-qrnn-dense",
        *(f"ptb-qrnn-{k}-{p}" for k in kinds for p in (50, 60, 80, 90)),
    ]


def test_mnist_and_the_figures():
    assert names("mnist") == ["mnist-dense", "mnist-dynamic-90", "mnist-dynamic-best-90"]
    assert names("figure1") == names("mnist")[1:]
    dynamic = [name for name in names("table1") + names("table2") if "-dynamic-" in name or "-margin-" in name]
    assert names("figure2") == dynamic


def test_every_number_of_the_paper_has_its_arm():
    every = {name for experiment in EXPERIMENTS for name in names(experiment, "paper")}
    assert set(PAPER) <= every
    assert len(PAPER) == 2 + 9 + 2 * 7


def test_names_with_wildcards_choose_and_unknown_names_are_refused():
    assert [arm.name for arm in choose_arms("table2", "paper", ["ptb-lstm-agp-*", "ptb-lstm-dense"])] == [
        "ptb-lstm-dense",
        "ptb-lstm-agp-50",
        "ptb-lstm-agp-75",
        "ptb-lstm-agp-90",
    ]
    with raises_blockgate("arms: expected names of arms of table2: ptb-lstm-dense, "):
        choose_arms("table2", "laptop", ["ptb-lstm-agp-50", "ptb-lstm-agp-51"])
    with raises_blockgate("reproduce: expected one of"):
        choose_arms("table3", "laptop")


def changes(run, base):
    """Names of what differs, nested ones with dots."""

    def flat(data, at=""):
        for name, value in data.items():
            yield from flat(value, f"{at}{name}.") if isinstance(value, dict) else [(at + name, value)]

    old, new = dict(flat(run_to_plain(base))), dict(flat(run_to_plain(run)))
    return {name for name in old if old[name] != new[name]}


@pytest.mark.parametrize("scale", ["laptop", "paper"])
def test_arms_share_recipe_head_and_number_of_updates(scale):
    base = shipped_configs()[f"ptb-lstm-{scale}"]
    dense = run_of(Arm("ptb-lstm", "dense"), base, 10000)
    shape = {"model.gate.block_size"}
    gated = shape | {
        f"model.{name}" for name in ("matrices", "gate.gate", "gate.sparsity", "gate.normalise", "gate.select")
    }
    allowed = {
        "dense": set(),
        "dynamic": gated,
        "dynamic-best": gated,
        "dynamic-slow": gated | {"optimizer.gate_lr"},
        "margin": gated | {"optimizer.revive"},
        "agp": {"pruning.sparsity", "pruning.begin", "pruning.end", "pruning.every"},
        "block-agp": shape | {f"pruning.{name}" for name in ("sparsity", "begin", "end", "every", "block_size")},
        "static": gated,
        "small": {"model.hidden_size"} | ({"model.embedding_size"} if scale == "paper" else set()),
    }
    ramp = {"ramp.begin", "ramp.end", "ramp.every"} if base.ramp.end else set()
    for arm in arms_of("table2", scale):
        if arm.kind != "dense" and arm.task == "ptb-lstm":
            changed = changes(run_of(arm, base, 10000), dense)
            dropout = {"model.dropout"} if arm.kind.endswith("-no-dropout") else set()
            may = allowed[arm.family] | dropout | (ramp if arm.kind.startswith(("dynamic", "margin")) else set())
            assert dropout <= changed <= may, arm.name
            assert changed


def test_options_of_the_arms():
    base = shipped_configs()["ptb-lstm-paper"]
    eq1 = run_of(Arm("ptb-lstm", "dynamic", 90), base)
    assert (eq1.model.matrices, eq1.model.gate.sparsity) == ("dynamic", 0.9)
    assert (eq1.model.gate.normalise, eq1.model.gate.select) == ("mean", "global")
    assert eq1.ramp == RampConfig(begin=25, end=40)
    best = run_of(Arm("ptb-lstm", "dynamic-best", 75), base)
    assert (best.model.gate.normalise, best.model.gate.select) == ("rms", "per_row")
    slow = run_of(Arm("ptb-lstm", "dynamic-slow", 75), base)
    assert slow == replace(best, optimizer=replace(best.optimizer, gate_lr=0.3 * best.optimizer.lr))
    agp = run_of(Arm("ptb-lstm", "agp", 90), base)
    assert (agp.pruning.begin, agp.pruning.end, agp.pruning.every) == pytest.approx((1, 25, 3))
    assert (agp.pruning.sparsity, agp.pruning.initial, agp.pruning.block_size) == (0.9, 0.05, None)
    assert agp.model.matrices == "dense"
    assert agp.ramp == RampConfig()
    assert run_of(Arm("ptb-lstm", "block-agp", 90), base).pruning.block_size == (128, 128)
    assert run_of(Arm("ptb-lstm", "static", 50), base).model.matrices == "static"


@pytest.mark.parametrize("percent", [50, 75, 90])
def test_small_dense_models_cost_no_less_than_either_dynamic_one(percent):
    base = shipped_configs()["ptb-lstm-laptop"]

    def macs(kind, **changes):
        run = run_of(Arm("ptb-lstm", kind, percent), base, 10000)
        return count_costs(LanguageModel(replace(run.model, **changes), 10000)).macs

    dearer = max(macs("dynamic"), macs("dynamic-best"))
    width = run_of(Arm("ptb-lstm", "small", percent), base, 10000).model.hidden_size
    assert macs("small", hidden_size=width - 1) < dearer <= macs("small")


SOFTMAX_SUM = {"model.gate.gate", "model.gate.normalise", "model.gate.select"}
LARGE = {"model.gate.block_size", "epochs"}
# What each ablation may change; all else is as in the plain arm.
ABLATED = {
    "plain": set(),
    "eq-1": {"model.gate.normalise", "model.gate.select"},
    "mean": {"model.gate.normalise"},
    "global": {"model.gate.select"},
    "unnormalised": {"model.gate.normalise"},
    "ramp": {"ramp.end", "ramp.every"},
    "near-dense": {"model.gate.near_dense"},
    "half-key": {"model.gate.key_size"},
    "double-key": {"model.gate.key_size"},
    "key-all": {"model.gate.key_size"},
    "low-rank": {"model.gate.key_size", "model.gate.gate_hidden"},
    "half-block": {"model.gate.block_size"},
    "double-block": {"model.gate.block_size"},
    "slow-gates": {"optimizer.gate_lr"},
    "fast-gates": {"optimizer.gate_lr"},
    "softmax-sum": SOFTMAX_SUM,
    "softmax-sum-annealed": SOFTMAX_SUM | {"anneal.end"},
    "softmax-sum-cold": SOFTMAX_SUM | {"anneal.end", "anneal.final"},
    "large": LARGE,
    "softmax-sum-large": SOFTMAX_SUM | LARGE,
    "softmax-sum-large-annealed": SOFTMAX_SUM | LARGE | {"anneal.end"},
    "softmax-sum-large-cold": SOFTMAX_SUM | LARGE | {"anneal.end", "anneal.final"},
    "sigmoid": {"model.gate.gate", "model.gate.normalise", "model.gate.select", "model.gate.sparsity"},
    "weight-drop": {"model.weight_dropout"},
    "no-dropout": {"model.dropout"},
    "output-dropout": {"model.dropout", "model.output_dropout"},
    "more-dropout": {"model.dropout"},
    "balance": {"balance"},
    "from-dense": {"start", "model.gate.near_dense"},
    "distilled": {"start", "model.gate.near_dense", "distil"},
}


def test_ablations_change_one_thing():
    base = replace(shipped_configs()["ptb-ablation-laptop"], output=Path("runs/ptb-ablation-from-dense-75/seed-2"))
    plain = run_of(Arm("ptb-ablation", "plain", 75), base)
    assert plain.model.gate.sparsity == 0.75
    arms = [arm for arm in arms_of("ablations", "laptop") if arm.kind in ABLATIONS]
    assert {arm.kind: changes(run_of(arm, base), plain) for arm in arms} == ABLATED
    assert run_of(Arm("ptb-ablation", "from-dense", 75), base).start == Path("runs/ptb-ablation-dense/seed-2")
    assert run_of(Arm("ptb-ablation", "half-key", 75), base).model.gate.key_size == 16
    of_paper = run_of(Arm("ptb-lstm", "double-key", 75), shipped_configs()["ptb-lstm-paper"])
    assert of_paper.model.gate.key_size == 256


def test_changes_of_the_dense_and_the_pruned_model_keep_what_they_are():
    base = shipped_configs()["ptb-ablation-laptop"]
    for kind in DENSE_CHANGES:
        made = run_of(Arm("ptb-ablation", kind), base)
        assert made.model.matrices == "dense"
        assert len(changes(made, run_of(Arm("ptb-ablation", "dense"), base))) == 1
    for kind in PRUNED_CHANGES:
        made = run_of(Arm("ptb-ablation", kind, 75), base)
        assert made.pruning.sparsity == 0.75
        assert changes(made, run_of(Arm("ptb-ablation", "agp", 75), base)) == {"model.dropout"}


def test_ablations_of_images_change_one_thing():
    base = replace(shipped_configs()["mnist-ablation-laptop"], output=Path("runs/mnist-ablation-from-dense-90/seed-1"))
    plain = run_of(Arm("mnist-ablation", "plain", 90), base)
    for arm in arms_of("mnist-ablations", "laptop")[1:]:
        # The text's recipe clips gradients anyway.
        clipped = {"optimizer.clip"} if "anneal.end" in ABLATED[arm.kind] else set()
        assert changes(run_of(arm, base), plain) == ABLATED[arm.kind] | clipped, arm.name
    annealed = run_of(Arm("mnist-ablation", "softmax-sum-cold", 90), base)
    assert (annealed.anneal.begin, annealed.anneal.end, annealed.anneal.final) == (0, 4, 0.001)
    of_paper = run_of(Arm("mnist", "half-key", 90), shipped_configs()["mnist-paper"])
    assert of_paper.model.gate.key_size == 512


@pytest.mark.parametrize("scale", SCALES[1:])
def test_there_is_a_config_for_every_task(scale):
    for experiment in EXPERIMENTS:
        for arm in arms_of(experiment, scale):
            assert f"{arm.task}-{scale}" in shipped_configs()


def test_every_file_of_the_folder_is_an_experiment_that_the_command_knows(capsys):
    folder = Path(experiments.__file__).parent
    assert {file.stem.replace("_", "-") for file in folder.glob("[a-z]*.py")} == set(EXPERIMENTS)
    for name, experiment in EXPERIMENTS.items():
        assert experiment.name == name
        assert bool(experiment.title) != bool(experiment.draw), "a table has a title, a figure draws"
    with pytest.raises(SystemExit, match="0"):
        main(["reproduce", "--help"])
    help_text = capsys.readouterr().out
    assert all(name in help_text for name in EXPERIMENTS)


def test_the_study_of_gates_has_its_controls_at_every_level():
    for task in ("ptb-qrnn", "ptb-lstm"):
        for percent in (50, 90):
            wanted = [f"{task}-{kind}-no-dropout-{percent}" for kind in ("mask", "random", "oracle", "margin")]
            assert set(wanted) <= set(names("gates"))
    base = shipped_configs()["ptb-lstm-laptop"]
    runs = {arm.family: run_of(arm, base) for arm in arms_of("gates", "laptop") if arm.percent == 90}
    areas = {math.prod(run.model.gate.block_size) for kind, run in runs.items() if kind != "mask"}
    assert areas == {256}
    assert runs["mask"].pruning.block_size == runs["oracle"].model.gate.block_size == (64, 4)
    assert runs["margin-square"].model.gate.block_size == (16, 16)
    assert runs["mask"].pruning.end == runs["oracle"].ramp.end == base.ramp.end
