"""Runs that start from a trained model, learn from it, or balance their gates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blockgate.gates import Gate
from blockgate.lab.training import load_trained, train
from blockgate.lab.training.checkpoint import load_checkpoint
from blockgate.lab.training.config import OptimizerConfig
from blockgate.lab.training.loop import _Training
from blockgate.lab.training.tasks import make_task
from blockgate.spec import GateSpec
from tests.corpora import tiny_text_run, write_texts
from tests.helpers import assert_close, raises_blockgate

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def dense(texts, tmp_path_factory):
    """A trained run without gates."""
    run = tiny_text_run(
        texts, tmp_path_factory.mktemp("dense") / "run", optimizer=OptimizerConfig(kind="adam", lr=0.01)
    )
    run = replace(run, model=replace(run.model, matrices="dense"))
    train(run, quiet=True)
    return run


def gated(dense, output, **changes):
    gate = replace(dense.model.gate, sparsity=0.0)
    model = replace(dense.model, matrices="dynamic", gate=replace(gate, near_dense=True))
    return replace(dense, output=output, model=model, **changes)


def test_a_gated_model_starts_where_the_dense_one_ended(dense, tmp_path):
    model = _Training(gated(dense, tmp_path / "run", start=dense.output), (), {}, quiet=True).module.eval()
    trained = load_trained(dense.output).model
    for name, weight in trained.state_dict().items():
        assert_close(model.state_dict()[name], weight)
    task = make_task(dense)
    with torch.no_grad():
        losses = [task.metrics(task.evaluate(m, "valid", CPU))["loss"] for m in (model, trained)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_a_start_of_other_sizes_is_refused(dense, tmp_path):
    run = gated(dense, tmp_path / "run", start=dense.output)
    with raises_blockgate("start: expected a run of the same sizes, vocabulary and output layer, got "):
        train(replace(run, model=replace(run.model, hidden_size=24)), quiet=True)
    with raises_blockgate("checkpoint: expected a file"):
        train(replace(run, start=tmp_path / "nowhere"), quiet=True)


def test_near_dense_gates_start_at_bias_1(texts, tmp_path):
    run = tiny_text_run(texts, tmp_path)
    near = replace(run, model=replace(run.model, gate=replace(run.model.gate, near_dense=True)))
    for made, bias in ((run, 0.0), (near, 1.0)):
        gates = [module for module in make_task(made).make_model().modules() if isinstance(module, Gate)]
        assert gates
        assert all(bool((gate.bias == bias).all()) for gate in gates)


def test_gate_kinds_reach_the_layers(texts, tmp_path):
    run = tiny_text_run(texts, tmp_path)
    spec = GateSpec(block_size=8, gate="sigmoid", sparsity=0.0)
    model = make_task(replace(run, model=replace(run.model, gate=spec))).make_model()
    gates = [module for module in model.modules() if isinstance(module, Gate)]
    assert {gate.kind for gate in gates} == {"sigmoid"}


def test_distillation_learns_what_the_teacher_says(dense, tmp_path):
    run = gated(dense, tmp_path / "run", start=dense.output, distil=0.25)
    task, plain = make_task(run), make_task(replace(run, distil=0.0))
    model, teacher = task.make_model().eval(), load_trained(dense.output).model
    words, targets = (part[:10] for part in task.train)
    with torch.no_grad():
        said, own = teacher(words)[0].exp(), model(words)[0]
        against_teacher, against_text = -(said * own).sum(-1).mean(), model.loss(words, targets).per_word.mean()
    batch = task.plan(0)[0]
    assert batch.length == 10
    step = task.learn(model, batch, None, CPU)
    assert_close(step.loss.detach(), 0.75 * against_text + 0.25 * against_teacher)
    assert_close(step.sums, plain.learn(model, batch, None, CPU).sums)
    # The teacher reads on where it stopped.
    second = task.learn(model, task.plan(0)[1], step.carried, CPU)
    told = [part[10:20] for part in task.train]
    with torch.no_grad():
        said = teacher(told[0], teacher(words)[1])[0].exp()
        own = model(told[0], model(words)[1])[0]
    expected = 0.75 * plain.learn(model, plain.plan(0)[1], step.carried, CPU).loss - 0.25 * (said * own).sum(-1).mean()
    assert_close(second.loss.detach(), expected.detach())


def test_distillation_needs_a_teacher(dense, tmp_path):
    with raises_blockgate("distil: expected a share in [0, 1], and --start, got 0.5"):
        train(gated(dense, tmp_path / "run", distil=0.5), quiet=True)


def test_balance_pulls_at_the_gates(texts, tmp_path):
    run = tiny_text_run(texts, tmp_path / "run", epochs=1)
    run = replace(run, model=replace(run.model, gate=replace(run.model.gate, gate="topk")))
    before = {
        name: value.detach().clone() for name, value in _Training(run, (), {}, quiet=True).module.named_parameters()
    }
    for weight in (0.0, 100.0):
        train(replace(run, output=tmp_path / f"{weight}", balance=weight), quiet=True)
    plain, balanced = (load_checkpoint(tmp_path / f"{weight}" / "last.pt")["model"] for weight in (0.0, 100.0))
    moved = {
        name: (float((plain[name] - at).norm()), float((balanced[name] - at).norm())) for name, at in before.items()
    }
    gates = [name for name in before if ".gate" in name or "gates" in name]
    assert gates
    assert all(moved[name][1] > moved[name][0] for name in gates if name.endswith("bias")), moved
