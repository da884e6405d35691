"""The callback in real runs of Lightning's Trainer, broken off and resumed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.errors import BlockgateWarning
from tests.helpers import raises_blockgate

pytest.importorskip("lightning")
# Lightning's advice on its own use.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
]

STEPS_PER_EPOCH = 4


def module(optimizer_first: bool = False) -> nn.Module:
    from lightning.pytorch import LightningModule

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
            self.seen: list[float] = []

        def training_step(self, batch, _index):
            self.seen.append(round(self.body[0].sparsity, 6))
            return self.body(batch).square().mean()

        def configure_optimizers(self):
            return self.early or torch.optim.SGD(self.parameters(), 0.01)

    net = Net()
    net.early = torch.optim.SGD(net.parameters(), 0.01) if optimizer_first else None
    bg.sparsify_(net, block_size=16, sparsity=0.0)
    return net


def fit(net, folder, callback, epochs, resume=None):
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback, ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=2)],
    )
    data = torch.utils.data.DataLoader(torch.randn(4 * STEPS_PER_EPOCH, 32), batch_size=4)
    trainer.fit(net, data, ckpt_path=resume)
    return trainer


@pytest.mark.parametrize(
    ("every", "span", "expected", "after"),
    [
        ("step", (2, 12), [0, 0, 0, 0.08, 0.16, 0.24, 0.32, 0.4, 0.48, 0.56, 0.64, 0.72], 0.8),
        ("epoch", (0, 4), [0] * 4 + [0.2] * 4 + [0.4] * 4, 0.6),
    ],
)
def test_the_ramp_runs_and_goes_on_after_a_break(every, span, expected, after, tmp_path):
    from blockgate.integrations.lightning import SparsityCallback

    def callback() -> SparsityCallback:
        return SparsityCallback(0.8, *span, every=every)

    whole = module()
    trainer = fit(whole, tmp_path, callback(), 3)
    assert whole.seen == expected
    assert whole.body[1].sparsity == pytest.approx(after)
    assert trainer.logged_metrics["sparsity"].item() == pytest.approx(expected[-1])
    for steps in (2, 4, 6, 8):  # in the middle and at the end of an epoch
        resumed = module()
        fit(resumed, tmp_path, callback(), 3, resume=tmp_path / f"step={steps}.ckpt")
        assert resumed.seen == expected[steps:]


def test_two_callbacks_for_two_groups_of_layers(tmp_path):
    from lightning.pytorch import Trainer

    from blockgate.integrations.lightning import SparsityCallback

    net = module()
    first = SparsityCallback(0.5, 0, 1, layers="body.0", name="first")
    second = SparsityCallback(0.75, 0, 1, layers="body.1", name="second")
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", max_steps=2, callbacks=[first, second], default_root_dir=tmp_path, **options)
    trainer.fit(net, torch.utils.data.DataLoader(torch.randn(8, 32), batch_size=4))
    assert [net.body[i].sparsity for i in (0, 1)] == [0.5, 0.75]


def test_an_optimizer_made_before_the_gates_is_told(tmp_path):
    from blockgate.integrations.lightning import SparsityCallback

    with pytest.warns(BlockgateWarning, match="the optimizer trains the model but none of its gates") as told:
        fit(module(optimizer_first=True), tmp_path, SparsityCallback(0.5, 0, 4), 2)
    assert sum(issubclass(one.category, BlockgateWarning) for one in told) == 1


def test_a_wrong_unit_is_refused():
    from blockgate.integrations.lightning import SparsityCallback

    with raises_blockgate("every: expected one of ('step', 'epoch'), got 'batch'"):
        SparsityCallback(0.5, 0, 1, every="batch")
