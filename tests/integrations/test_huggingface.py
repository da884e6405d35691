"""The callback in a real run of transformers' Trainer, and under its hooks: broken off and resumed at any step."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.errors import BlockgateWarning
from tests.helpers import raises_blockgate

pytest.importorskip("transformers")

STEPS_PER_EPOCH = 4


def model() -> nn.Module:
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    bg.sparsify_(net, block_size=16, sparsity=0.0)
    return net


class Run:
    """The loop of a Trainer, with its own handler of callbacks."""

    def __init__(self, net, callback, state=None) -> None:
        from transformers import TrainerControl, TrainerState
        from transformers.trainer_callback import CallbackHandler

        self.net, self.state, self.control = net, state or TrainerState(epoch=0.0), TrainerControl()
        self.handler = CallbackHandler([callback], net, None, None, None)
        self.seen: list[float] = []

    def fire(self, event, **others) -> None:
        self.control = getattr(self.handler, event)(None, self.state, self.control, **others)

    def log(self) -> dict[str, float]:
        logs = {"loss": 1.0}
        self.state.log_history.append(dict(logs))
        self.fire("on_log", logs=logs)
        return logs

    def train(self, steps) -> None:
        self.fire("on_train_begin")
        for _ in range(steps):
            self.seen.append(round(self.net[0].sparsity, 6))
            self.state.global_step += 1
            self.state.epoch = self.state.global_step / STEPS_PER_EPOCH
            self.fire("on_step_end")
            if self.state.global_step % STEPS_PER_EPOCH == 0:
                self.fire("on_epoch_end")


@pytest.mark.parametrize(
    ("every", "span", "expected"),
    [
        ("step", (2, 10), [0, 0, 0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.8]),
        ("epoch", (0, 2), [0] * 4 + [0.4] * 4 + [0.8] * 4),
    ],
)
def test_the_ramp_runs_and_goes_on_after_a_break(every, span, expected, tmp_path):
    from transformers import TrainerState

    from blockgate.integrations.huggingface import SparsityCallback

    whole = Run(model(), SparsityCallback(0.8, *span, every=every))
    whole.train(12)
    assert whole.seen == expected
    for steps in (3, 4, 7):
        first = Run(model(), SparsityCallback(0.8, *span, every=every))
        first.train(steps)
        first.state.save_to_json(str(tmp_path / "trainer_state.json"))
        state = TrainerState.load_from_json(str(tmp_path / "trainer_state.json"))
        resumed = Run(model(), SparsityCallback(0.8, *span, every=every), state)
        resumed.train(12 - steps)
        assert first.seen + resumed.seen == expected


def test_the_sparsity_is_logged_once_training_runs():
    from blockgate.integrations.huggingface import SparsityCallback

    run = Run(model(), SparsityCallback(0.5, 0, 2, name="share closed"))
    assert run.log() == {"loss": 1.0}  # an evaluation without training
    run.train(1)
    assert run.log() == {"loss": 1.0, "share closed": 0.25}
    assert run.state.log_history == [{"loss": 1.0}, {"loss": 1.0, "share closed": 0.25}]


class Regression(nn.Module):
    """What a Trainer trains: takes inputs and labels by name, and returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, x, labels):
        y = self.net(x)
        return {"loss": nn.functional.mse_loss(y, labels), "logits": y}


@pytest.mark.filterwarnings("ignore")  # of the Trainer and accelerate, about pinned memory and the like
def test_a_real_trainer_drives_the_ramp_and_resumes(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    from blockgate.integrations.huggingface import SparsityCallback

    data = [{"x": torch.randn(32), "labels": torch.randn(32)} for _ in range(16)]
    options = {"per_device_train_batch_size": 4, "logging_steps": 1, "report_to": [], "use_cpu": True, "save_steps": 3}

    def trainer(epochs):
        arguments = TrainingArguments(str(tmp_path), num_train_epochs=epochs, disable_tqdm=True, **options)
        return Trainer(model=Regression(), args=arguments, train_dataset=data, callbacks=[SparsityCallback(0.8, 0, 8)])

    first = trainer(2)
    first.train()
    logged = [round(entry["sparsity"], 6) for entry in first.state.log_history if "loss" in entry]
    assert logged == pytest.approx([0.1 * step for step in range(1, 9)])
    assert first.model.net[0].sparsity == 0.8

    resumed = trainer(2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    logged = [round(entry["sparsity"], 6) for entry in resumed.state.log_history if "loss" in entry]
    assert logged == pytest.approx([0.1 * step for step in range(1, 9)])


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_made_before_the_gates_is_told(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    from blockgate.integrations.huggingface import SparsityCallback

    class Late(Regression):
        """Is gated after its optimizer was made."""

        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
            self.optimizer = torch.optim.SGD(self.parameters(), 0.01)
            bg.sparsify_(self.net, block_size=16, sparsity=0.0)

    def run(net, optimizer):
        data = [{"x": torch.randn(32), "labels": torch.randn(32)} for _ in range(8)]
        options = {"per_device_train_batch_size": 4, "report_to": [], "use_cpu": True, "save_strategy": "no"}
        arguments = TrainingArguments(str(tmp_path), num_train_epochs=1, disable_tqdm=True, **options)
        callbacks = [SparsityCallback(0.5, 0, 4)]
        Trainer(net, arguments, train_dataset=data, callbacks=callbacks, optimizers=(optimizer, None)).train()

    net = Late()
    with pytest.warns(BlockgateWarning, match="the optimizer trains the model but none of its gates"):
        run(net, net.optimizer)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(net, torch.optim.SGD(net.parameters(), 0.01))
    assert not any(issubclass(one.category, BlockgateWarning) for one in told)


def test_a_wrong_unit_is_refused():
    from blockgate.integrations.huggingface import SparsityCallback

    with raises_blockgate("every: expected one of ('step', 'epoch'), got 'batch'"):
        SparsityCallback(0.5, 0, 1, every="batch")
