"""A gated model that learns from its dense form."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.checkpoint.states import write_state
from blockgate.errors import BlockgateError
from blockgate.integrations.distil import distil_loss
from tests.helpers import raises_blockgate
from tests.model_zoo import bert, gpt2, tokens

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")


def pair():
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    student = copy.deepcopy(teacher)
    bg.sparsify_(student, block_size=(32, 8), filter_fn=lambda *_: True)
    return student, teacher, [torch.randn(16, 32) for _ in range(4)]


def test_it_learns_and_ramps():
    student, teacher, batches = pair()
    bg.set_sparsity(student, 0.5)
    before = distil_loss(student(batches[0]), teacher(batches[0])).item()
    losses = bg.distil(student, teacher, batches, steps=40, sparsity=0.5, ramp=(5, 20), lr=1e-2)
    assert len(losses) == 40
    assert student[0].sparsity == 0.5
    assert losses[0] < losses[21]
    assert losses[-1] < min(before, losses[21])
    assert student.training
    assert all(p.grad is None for p in teacher.parameters())


def test_it_goes_on_where_it_was(tmp_path):
    whole, teacher, batches = pair()
    broken = copy.deepcopy(whole)
    options = {"steps": 12, "sparsity": 0.75, "lr": 1e-3}
    wanted = bg.distil(whole, teacher, batches, **options)

    class StopError(Exception):
        pass

    def stop(done, of, loss):
        assert of == 12
        assert loss > 0
        if done == 7:
            raise StopError

    saved = {"checkpoint": tmp_path / "run.pt", "save_every": 3}
    with pytest.raises(StopError):
        bg.distil(broken, teacher, batches, **options, **saved, progress=stop)
    fresh = copy.deepcopy(broken)
    assert bg.distil(fresh, teacher, batches, **options, **saved) == wanted
    for name, value in whole.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[name]), name
    with raises_blockgate("run of 13 steps"):
        bg.distil(fresh, teacher, batches, **{**options, "steps": 13}, **saved)


def saved_run(folder):
    """A checkpoint in the middle of a run, and the call that goes on from it."""
    student, teacher, batches = pair()
    options = {"steps": 4, "sparsity": 0.5, "checkpoint": folder / "run.pt", "save_every": 2}

    class StopError(Exception):
        pass

    def stop(done, *_):
        if done == 3:
            raise StopError

    with pytest.raises(StopError):
        bg.distil(copy.deepcopy(student), teacher, batches, **options, progress=stop)
    return student, lambda model: bg.distil(model, teacher, batches, **options), options["checkpoint"]


def test_no_damaged_checkpoint_is_gone_on_from(tmp_path):
    """A bit of every 97th byte: refused with one error of ours, the student untouched; or read as it was."""
    student, go_on, file = saved_run(tmp_path)
    wanted, whole = go_on(copy.deepcopy(student)), None
    student, go_on, file = saved_run(tmp_path / "again")
    data, refused = file.read_bytes(), 0
    for at in range(0, len(data), max(97, len(data) // 150)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        file.write_bytes(damaged)
        model = copy.deepcopy(student)
        try:
            assert go_on(model) == wanted
        except BlockgateError as error:
            refused, said, whole = refused + 1, str(error), model.state_dict()
            if "expected" not in said or str(file) not in said:
                raise
    assert refused > 30
    for name, value in student.state_dict().items():
        assert torch.equal(value, whole[name]), name


@pytest.mark.parametrize("key", ["steps", "student", "optimizer", "schedule", "ramp", "random", "losses"])
def test_what_a_checkpoint_lacks_is_told(key, tmp_path):
    student, go_on, file = saved_run(tmp_path)
    state = torch.load(file)
    del state[key], state["format"], state["digest"]
    write_state(file, state)
    with raises_blockgate("format 2 of distil"):
        go_on(student)


def test_another_student_is_told_and_untouched(tmp_path):
    _, go_on, _ = saved_run(tmp_path)
    other = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))
    bg.sparsify_(other, block_size=(32, 8), filter_fn=lambda *_: True)
    before = copy.deepcopy(other.state_dict())
    with raises_blockgate("the checkpoint of a model like this one, got 'other tensors: 0.bias"):
        go_on(other)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    monkeypatch.setattr(Fabric, "is_global_zero", False)
    student, teacher, batches = pair()
    bg.distil(student, teacher, batches, steps=2, checkpoint=tmp_path / "run.pt", fabric=fabric)
    assert not (tmp_path / "run.pt").exists()


@pytest.mark.parametrize(("make", "compare"), [(gpt2, "logits"), (bert, "logits"), (bert, "hidden")])
def test_hugging_face_outputs(make, compare):
    teacher, example = make().eval(), {"input_ids": tokens()}
    assert distil_loss(teacher(**example), teacher(**example), compare).abs() < 1e-6
    student = copy.deepcopy(teacher)
    bg.sparsify_(student, block_size=8, sparsity=0.5)
    losses = bg.distil(student, teacher, [example], steps=3, loss=compare)
    assert len(losses) == 3
    assert losses[0] > 0


def test_embeddings_and_mistakes():
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    wanted = 1 - torch.nn.functional.cosine_similarity(x, y).mean()
    torch.testing.assert_close(distil_loss(x, (y,), "embedding"), wanted)
    with raises_blockgate("compare: expected one of"):
        distil_loss(x, y, "vibes")
    with raises_blockgate("outputs of the teacher's shapes"):
        distil_loss(x, y[:2])
    student, teacher, batches = pair()
    with raises_blockgate("teacher: expected parameters of its own"):
        bg.distil(student, student, batches, steps=2)
    with raises_blockgate("batches: expected at least one"):
        bg.distil(student, teacher, [], steps=2)
