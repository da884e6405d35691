"""Runs of former versions, whose language models had one module for each recurrent layer: they load and resume."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blockgate.lab.models import language_model
from blockgate.lab.training import Hook, evaluate, load_trained, train
from blockgate.lab.training.checkpoint import load_checkpoint, save_checkpoint
from blockgate.lab.training.config import (
    OptimizerConfig,
    PruningConfig,
    RampConfig,
    differences,
    run_from_plain,
    run_to_plain,
)
from blockgate.spec import GateSpec
from tests.corpora import tiny_text_run, write_texts
from tests.lab.training.test_resume import Crash

PRUNING = PruningConfig(sparsity=0.5, begin=0.1, end=1.5, every=0.2)
RUNS = {
    "adam": ("dynamic", {"optimizer": OptimizerConfig(kind="adam", lr=0.01), "ramp": RampConfig(end=1.0)}),
    "asgd": ("dynamic", {"optimizer": OptimizerConfig(kind="asgd", lr=50.0, clip=0.25, average_after=0), "epochs": 4}),
    "pruned": ("dense", {"optimizer": OptimizerConfig(lr=1.0, momentum=0.9, clip=0.25), "pruning": PRUNING}),
}


def in_former_format(file):
    """Averages were a list in the order of the parameters."""
    state = load_checkpoint(file)
    for saved in state.get("training", {}).get("hooks", []):
        if "means" in saved:
            saved["means"] = list(saved["means"].values())
    save_checkpoint(file, state)


@pytest.mark.parametrize("cell", ["lstm", "qrnn"])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_single_layers_is_resumed_exactly_as_a_stack(name, cell, tmp_path, monkeypatch):
    texts = write_texts(tmp_path / "texts", train=700, other=120)
    matrices, options = RUNS[name]
    run = tiny_text_run(texts, tmp_path / "whole", **options)
    # Without weight dropout and zoneout, both layouts draw the same random numbers in the same order.
    model = replace(run.model, cell=cell, matrices=matrices, locked=False, weight_dropout=0.0, zoneout=0.0)
    run = replace(run, model=model)
    broken = replace(run, output=tmp_path / "broken", checkpoint_seconds=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(language_model, "_fits_one_stack", lambda _: False)
        expected = train(run, quiet=True)
        with pytest.raises(RuntimeError, match="crash"):
            train(broken, hooks=[lambda *_: Crash(60 if name == "asgd" else 25)], quiet=True)
    former = load_checkpoint(tmp_path / "broken" / "last.pt")
    assert any(key.startswith("layers.1.") for key in former["model"])
    in_former_format(tmp_path / "broken" / "last.pt")

    found = train(replace(broken, resume=True), hooks=[lambda *_: Hook()], quiet=True)
    assert found == expected
    stack, single = (load_trained(tmp_path / folder) for folder in ("broken", "whole"))
    assert stack.model.is_one_stack
    for key, value in single.model.state_dict().items():
        assert torch.equal(stack.model.state_dict()[key], value), key
    assert evaluate(single, "test")["perplexity"] == pytest.approx(expected["test"]["perplexity"], rel=1e-5)


def test_a_run_may_start_from_one_of_the_other_layout(tmp_path):
    texts = write_texts(tmp_path / "texts", train=300, other=60)
    dense = tiny_text_run(texts, tmp_path / "dense", epochs=1)
    dense = replace(dense, model=replace(dense.model, matrices="dense", dropout=0.2))
    train(dense, quiet=True)
    assert not load_trained(tmp_path / "dense").model.is_one_stack
    gated = replace(dense, output=tmp_path / "gated", start=tmp_path / "dense")
    train(replace(gated, model=replace(gated.model, matrices="dynamic", dropout=0.0)), quiet=True)
    assert load_trained(tmp_path / "gated").model.is_one_stack


def test_options_of_gates_in_the_words_of_version_0_1():
    model = {"gate": {"kind": "eq1", "key_size": "all", "near_dense": True, "block_size": 8}}
    run = run_from_plain({"task": "language-model", "model": model, "pruning": {"block_size": 8}})
    assert run.model.gate == GateSpec(gate="eq1", key_size=None, block_size=8, near_dense=True)
    of_model = {"near_dense": True, "gate": {"near_dense": False, "gate": "eq1", "key_size": None, "block_size": 8}}
    assert run_from_plain({"task": "language-model", "model": of_model}).model == run.model
    assert run_from_plain({"task": "images", "model": {"gate": {"key_size": "auto"}}}).model.gate.key_size == "auto"
    # Written again in the words of now, it is the same run.
    assert run_from_plain(run_to_plain(run)) == run
    former = {"task": "language-model", "model": model, "pruning": {"block_size": 8}}
    assert differences(former, run_to_plain(run)) == []


def test_options_of_gates_matter_where_there_are_gates(tmp_path):
    run = tiny_text_run(tmp_path, tmp_path / "run")
    other = replace(
        run, model=replace(run.model, gate=GateSpec(block_size=2)), optimizer=replace(run.optimizer, revive=0.5)
    )
    assert len(differences(run_to_plain(run), run_to_plain(other))) == 2
    dense = [replace(r, model=replace(r.model, matrices="dense")) for r in (run, other)]
    assert differences(*map(run_to_plain, dense)) == []
