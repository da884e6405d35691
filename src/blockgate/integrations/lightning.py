"""A callback for Lightning: raises the sparsity of a model while it trains."""

from __future__ import annotations

from typing import Any, cast

from blockgate.errors import BlockgateError
from blockgate.integrations.clock import TrainerRamp

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise BlockgateError(
        "integrations.lightning: expected the package lightning, got none. "
        "Install it with pip install 'blockgate[train]'."
    ) from error

__all__ = ["SparsityCallback"]


class SparsityCallback(Callback):
    """Moves the sparsity of all gated layers along a `SparsityRamp`, and logs it as "sparsity".

    The ramp follows Lightning's own count of optimizer steps or epochs, so a run that resumes from a checkpoint goes on
    where it was.

    Args:
        final: sparsity at the end, in [0, 1).
        begin: the last step or epoch that still has the initial sparsity.
        end: the first one with the final sparsity.
        shape: "linear" or "cubic".
        initial: sparsity before the ramp, in [0, 1).
        layers: name pattern of the layers that it moves; several callbacks may share a model.
        every: "step" or "epoch", the unit of begin and end.
        name: what the log calls it.
    """

    def __init__(
        self,
        final: float,
        begin: int,
        end: int,
        shape: str = "linear",
        *,
        initial: float = 0.0,
        layers: str = "*",
        every: str = "step",
        name: str = "sparsity",
    ) -> None:
        self.name = name
        self._ramp = TrainerRamp(every, final=final, begin=begin, end=end, shape=shape, initial=initial, layers=layers)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the ramp where the trainer stands."""
        self._ramp.start(pl_module)
        self._ramp.follow(steps=trainer.global_step, epochs=trainer.current_epoch)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Follows the count of epochs."""
        self._ramp.follow(steps=trainer.global_step, epochs=trainer.current_epoch)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Logs the sparsity of this step, and sets that of the next."""
        pl_module.log(self.name, cast("float", self._ramp.sparsity))
        self._ramp.follow(steps=trainer.global_step, epochs=trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Sets the sparsity of the next epoch."""
        self._ramp.follow(steps=trainer.global_step, epochs=trainer.current_epoch + 1)
