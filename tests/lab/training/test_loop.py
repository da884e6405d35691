"""The loop: it learns, writes what it promises, refuses what can't work, and loses nothing."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest
import torch

import blockgate as bg
from blockgate.gates import Gate
from blockgate.lab.training import Hook, LanguageModelRun, evaluate, load_trained, shipped_configs, train
from blockgate.lab.training.checkpoint import load_checkpoint, save_checkpoint
from blockgate.lab.training.config import ImageRun, OptimizerConfig, RampConfig, ScheduleConfig, run_to_plain
from blockgate.lab.training.config_files import load_run
from blockgate.lab.training.gate_health import gate_facts
from blockgate.lab.training.tasks import make_task
from tests.corpora import tiny_image_run, tiny_text_run, write_images, write_texts
from tests.helpers import assert_close, raises_blockgate


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"))


def rows_of(run):
    return list(csv.DictReader((run.output / "epochs.csv").read_text().splitlines()))


def test_a_language_model_learns_and_leaves_its_files(texts, tmp_path):
    run = tiny_text_run(texts, tmp_path / "run", epochs=4, optimizer=OptimizerConfig(kind="adam", lr=0.02))
    results = train(run, notes={"who": "test"}, quiet=True)
    # Of 41 words, three may follow each: knowing nothing would give 41, knowing how frequent each is about 35.
    assert results["test"]["perplexity"] < 25
    rows = rows_of(run)
    assert [row["epoch"] for row in rows] == ["1", "2", "3", "4"]
    assert float(rows[-1]["valid_perplexity"]) < float(rows[0]["valid_perplexity"])
    assert {"train_loss", "train_lr", "train_sparsity", "train_tokens_per_second", "density"} <= rows[0].keys()
    assert json.loads((run.output / "results.json").read_text()) == results
    stored = json.loads((run.output / "run.json").read_text())
    assert stored["notes"] == {"who": "test"}
    assert stored["run"] == run_to_plain(run)
    assert len(stored["data_sha256"]) == 64
    assert list((run.output / "tensorboard").iterdir())
    assert evaluate(load_trained(run.output), "test")["loss"] == pytest.approx(results["test"]["loss"], rel=1e-6)


def test_segments_in_a_row_lose_what_one_long_segment_would(texts, tmp_path):
    device = torch.device("cpu")
    short, long = (make_task(tiny_text_run(texts, tmp_path, bptt=bptt)) for bptt in (10, 20))
    model = short.make_model().eval()
    first = short.learn(model, short.plan(0)[0], None, device)
    second = short.learn(model, short.plan(0)[1], first.carried, device)
    whole = long.learn(model, long.plan(0)[0], None, device)
    assert_close((first.sums + second.sums).float(), whole.sums.float())
    # The next epoch begins at the beginning of the text, whatever the last one left.
    assert_close(short.learn(model, short.plan(1)[0], second.carried, device).sums, first.sums)


def test_an_image_network_learns(images, tmp_path):
    run = tiny_image_run(images, tmp_path / "run", epochs=8)
    results = train(run, quiet=True)
    assert results["test"]["error"] < 0.5
    assert evaluate(load_trained(run.output), "test")["error"] == pytest.approx(results["test"]["error"])


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_every_shipped_config_runs_a_few_steps(name, texts, images, tmp_path):
    run = shipped_configs()[name]
    gate = replace(
        run.model.gate, block_size=4, key_size=run.model.gate.key_size if run.model.gate.key_size == "auto" else 8
    )
    if isinstance(run, LanguageModelRun):
        cutoffs = tuple(10 * (n + 1) for n in range(len(run.model.cutoffs)))
        model = replace(run.model, embedding_size=8, hidden_size=12, cutoffs=cutoffs, gate=gate)
        run = replace(run, model=model, data=str(texts), bptt=20, batch_size=4)
    else:
        run = replace(run, model=replace(run.model, hidden_size=16, gate=gate), data=str(images), valid_size=40)
    ramp = replace(run.ramp, begin=0, end=min(run.ramp.end, 1))
    run = replace(run, epochs=1, ramp=ramp, eval_batch_size=4, output=tmp_path / "run", accelerator="cpu", threads=1)
    results = train(run, quiet=True)
    assert results["test"]["loss"] > 0
    assert load_run_of(tmp_path / "run") == run


def load_run_of(folder):
    return load_trained(folder).run


def test_shipped_configs_cover_laptop_and_paper_scale():
    configs = shipped_configs()
    for task in ("mnist", "ptb-lstm", "ptb-qrnn", "wikitext-2-lstm"):
        assert {f"{task}-laptop", f"{task}-paper"} <= configs.keys()
    assert configs["ptb-lstm-paper"].output.name == "ptb-lstm-paper"
    assert isinstance(configs["mnist-paper"], ImageRun)


def test_the_best_model_is_at_the_final_sparsity(texts, tmp_path):
    run = tiny_text_run(texts, tmp_path / "run", epochs=4, ramp=RampConfig(begin=0, end=3))
    train(run, quiet=True)
    assert [float(row["train_sparsity"]) for row in rows_of(run)] == pytest.approx([0, 0.5 / 3, 1 / 3, 0.5])
    assert load_checkpoint(run.output / "best.pt")["epoch"] == 4
    assert {
        float(gate) for name, gate in load_trained(run.output).model.state_dict().items() if "sparsity" in name
    } == {0.5}


def test_hooks_are_called_and_kept(texts, tmp_path):
    class Counter(Hook):
        def __init__(self):
            self.updates, self.scores, self.evaluations = 0, [], 0

        def after_update(self):
            self.updates += 1

        def after_epoch(self, score):
            self.scores.append(score)

        def state_dict(self):
            return {"updates": self.updates}

    made = []
    run = tiny_text_run(texts, tmp_path / "run")
    train(run, hooks=[lambda model, updates: made.append((Counter(), model, updates)) or made[-1][0]], quiet=True)
    counter, _, updates = made[0]
    assert counter.updates == 2 * updates
    assert counter.scores == [float(row["valid_perplexity"]) for row in rows_of(run)]
    assert load_checkpoint(run.output / "last.pt")["training"]["hooks"] == [{"updates": 2 * updates}]


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_good_checkpoint(texts, tmp_path):
    class Spoil(Hook):
        def __init__(self, model):
            self.model, self.updates = model, 0

        def after_update(self):
            self.updates += 1
            if self.updates == 50:
                torch.nn.init.constant_(self.model.embedding.weight, float("nan"))

    run = tiny_text_run(texts, tmp_path / "run", epochs=3)
    with pytest.raises(Exception, match="expected a finite loss, got NaN"):
        train(run, hooks=[lambda model, _: Spoil(model)], quiet=True)
    assert all(t.isfinite().all() for t in load_trained(run.output / "last.pt").model.state_dict().values())


def test_what_cannot_work_is_refused_at_once(texts, tmp_path):
    run = tiny_text_run(texts, tmp_path / "run")
    for options, message in (
        ({"epochs": 0}, "epochs: expected at least 1"),
        ({"batch_size": 3, "devices": 2}, "a multiple of 2 devices"),
        ({"threads": 0}, "threads"),
        ({"bptt": 0}, "bptt"),
        ({"resume": True}, "a folder with a run"),
        ({"batch_size": 5000}, "batch size"),
        ({"accelerator": "abacus"}, "what Lightning Fabric can run here"),
        ({"precision": "7-true"}, "what Lightning Fabric can run here"),
        ({"schedule": ScheduleConfig(factor=0)}, "schedule"),
        ({"data": str(tmp_path)}, "a folder with train.txt"),
    ):
        with raises_blockgate(message):
            train(replace(run, **options), quiet=True)
    assert not run.output.exists()


def test_a_finished_run_is_not_overwritten(texts, tmp_path):
    run = tiny_text_run(texts, tmp_path / "run", epochs=1)
    results = train(run, quiet=True)
    with raises_blockgate("a new folder"):
        train(run, quiet=True)
    assert train(replace(run, resume=True), quiet=True) == results
    with raises_blockgate("batch_size: 4 -> 8; optimizer.lr: 5.0 -> 3.0"):
        train(replace(run, resume=True, batch_size=8, optimizer=replace(run.optimizer, lr=3.0)), quiet=True)
    with raises_blockgate("other hooks"):
        train(replace(run, resume=True), hooks=[lambda *_: Hook()], quiet=True)


def test_a_run_is_not_resumed_with_other_data(tmp_path):
    texts = write_texts(tmp_path / "texts", train=300, other=100)
    run = tiny_text_run(texts, tmp_path / "run", epochs=1)
    train(run, quiet=True)
    (texts / "valid.txt").write_text("w1 w1 w1 w1 w1\n")
    with raises_blockgate("other data"):
        train(replace(run, resume=True), quiet=True)


def test_a_ramp_is_for_gates_alone(texts, tmp_path):
    run = tiny_text_run(texts, tmp_path / "run", epochs=1, ramp=RampConfig(end=5))
    train(replace(run, model=replace(run.model, matrices="dense")), quiet=True)
    assert "train_sparsity" not in rows_of(run)[0]


def test_bad_checkpoints_are_refused(tmp_path):
    file = tmp_path / "best.pt"
    with raises_blockgate("which isn't there"):
        load_trained(tmp_path)
    file.write_bytes(b"no checkpoint")
    with raises_blockgate("a file that blockgate train wrote"):
        load_trained(tmp_path)
    torch.save({"weights": torch.ones(3)}, file)
    with raises_blockgate("format 1"):
        load_trained(file)
    save_checkpoint(file, {"run": {"task": "language-model"}, "model": {}, "vocabulary": ["<eos>", "<unk>"]})
    with raises_blockgate("weights that fit its config"):
        load_trained(file)
    assert [path.name for path in tmp_path.iterdir()] == ["best.pt"]


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path):
    file = tmp_path / "last.pt"
    save_checkpoint(file, {"run": {}, "model": {}})
    before = file.read_bytes()
    with pytest.raises(Exception, match="pickle"):
        save_checkpoint(file, {"model": lambda: None})
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_a_bad_config_file_is_one_error(tmp_path):
    file = tmp_path / "run.json"
    for text, message in (
        ("{", "a JSON file"),
        ("{}", "a task"),
        ('{"task": "images", "epochs": 1.5}', "config.epochs"),
    ):
        file.write_text(text)
        with raises_blockgate(message):
            load_run(file)


def test_gate_facts_are_those_of_the_gates():
    layer = bg.DynamicSparseLinear(16, 16, block_size=4, sparsity=0.5).eval()
    x = torch.randn(200, 16)
    with bg.record_gates(layer) as record, torch.no_grad():
        layer(x)
    opened = (layer.gates(x) != 0).double().mean(0)
    expected = {
        "density": opened.mean().item(),
        "input_dependent": ((opened >= 0.05) & (opened <= 0.95)).double().mean().item(),
        "dead_blocks": (opened == 0).double().mean().item(),
        "always_open": (opened > 0.95).double().mean().item(),
    }
    assert gate_facts(record) == pytest.approx(expected)


def test_a_collapsed_gate_is_told(texts, tmp_path, capsys):
    class Collapse(Hook):
        def __init__(self, model):
            self.gates = [module for module in model.modules() if isinstance(module, Gate)]

        def after_update(self):
            for gate in self.gates:
                torch.nn.init.zeros_(gate.weight)
                gate.bias.data = torch.arange(1.0, 1.0 + len(gate.bias))

    run = tiny_text_run(texts, tmp_path / "run", epochs=1)
    train(run, hooks=[lambda model, _: Collapse(model)])
    assert "warning: layers.0.filters.0" in capsys.readouterr().err
    assert float(rows_of(run)[0]["input_dependent"]) == 0
    assert float(rows_of(run)[0]["dead_blocks"]) == pytest.approx(0.5)
