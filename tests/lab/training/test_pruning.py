"""Pruning in the loop: on time, kept at zero, in the best model, and exact after a stop."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from blockgate.lab.models import count_costs
from blockgate.lab.training import load_trained, train
from blockgate.lab.training.config import OptimizerConfig, PruningConfig
from tests.corpora import tiny_image_run, tiny_text_run, write_images, write_texts
from tests.helpers import raises_blockgate
from tests.lab.training.test_resume import crash_and_resume

PRUNING = PruningConfig(sparsity=0.9, begin=0.5, end=1.5, every=0.25)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"), train=700, other=120)


def pruned_run(texts, output, cell="lstm", **options):
    run = tiny_text_run(texts, output, epochs=3, pruning=PRUNING, **options)
    return replace(run, model=replace(run.model, cell=cell, matrices="dense"))


@pytest.mark.parametrize("cell", ["lstm", "qrnn"])
def test_the_best_model_is_pruned_and_the_curve_shows_how(cell, texts, tmp_path):
    run = pruned_run(texts, tmp_path / "run", cell, optimizer=OptimizerConfig(kind="adam", lr=0.01))
    train(run, quiet=True)
    rows = list(csv.DictReader((run.output / "epochs.csv").read_text().splitlines()))
    # After half of the way, 1 - (1/2)^3 of 0.05 to 0.9.
    assert [float(row["train_sparsity"]) for row in rows] == pytest.approx([0.9 - 0.85 / 8, 0.9, 0.9])
    trained = load_trained(run.output)
    costs = count_costs(trained.model)
    assert costs.matrix_macs / costs.matrix_macs_dense == pytest.approx(0.1, abs=0.002)
    # Nothing but the recurrent layers is pruned.
    assert costs.macs_dense - costs.macs == costs.matrix_macs_dense - costs.matrix_macs == costs.zeros


def test_blocks_of_an_image_network(tmp_path):
    images = write_images(tmp_path / "images")
    pruning = replace(PRUNING, sparsity=0.75, block_size=8)
    run = tiny_image_run(images, tmp_path / "run", pruning=pruning)
    run = replace(run, model=replace(run.model, matrices="dense"))
    train(run, quiet=True)
    model = load_trained(run.output).model
    assert model.matrix_layers == ("layers.3", "layers.5")
    costs = count_costs(model)
    assert costs.matrix_macs == 0.25 * costs.matrix_macs_dense == 0.25 * 2 * 32 * 32


def test_a_pruned_run_that_crashes_ends_the_same(texts, tmp_path):
    run = pruned_run(texts, tmp_path, optimizer=OptimizerConfig(lr=5.0, clip=0.25, momentum=0.9))
    expected = crash_and_resume(run, tmp_path, (3, 12, 14))
    assert expected[1]["training"]["hooks"][0]["pruned"]


def test_pruning_that_would_not_end_is_refused(texts, tmp_path):
    with raises_blockgate("pruning.end: expected at most 1 epochs"):
        train(replace(pruned_run(texts, tmp_path / "run"), epochs=1), quiet=True)
    assert not (tmp_path / "run").exists()


def test_gated_models_are_not_pruned(texts, tmp_path):
    with raises_blockgate("weights: expected one matrix or more"):
        train(tiny_text_run(texts, tmp_path / "run", pruning=PRUNING), quiet=True)


def test_static_matrices_train(texts, tmp_path):
    run = tiny_text_run(texts, tmp_path / "run")
    run = replace(run, model=replace(run.model, cell="lstm", matrices="static"))
    train(run, quiet=True)
    costs = count_costs(load_trained(run.output).model)
    assert costs.matrix_macs == 0.5 * costs.matrix_macs_dense
