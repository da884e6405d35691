"""What the callbacks share: a ramp that follows the clock of a trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blockgate.errors import invalid
from blockgate.schedule import SparsityRamp

if TYPE_CHECKING:
    from torch import nn

__all__ = ["TrainerRamp"]

CLOCKS = ("step", "epoch")


class TrainerRamp:
    """A `SparsityRamp` that takes the time from a trainer, which restores its clock from a checkpoint by itself.

    Args:
        every: "step" (of the optimizer) or "epoch": what the ramp counts.
        ramp: the arguments of `SparsityRamp` but the model.
    """

    def __init__(self, every: str, **ramp: Any) -> None:
        if every not in CLOCKS:
            raise invalid("every", expected=f"one of {CLOCKS}", got=every, remedy="It is the unit of begin and end.")
        self.every = every
        self._options = ramp
        self._ramp: SparsityRamp | None = None

    def start(self, model: nn.Module) -> None:
        """Makes the ramp of `model`."""
        self._ramp = SparsityRamp(model, **self._options)

    def follow(self, *, steps: int, epochs: int) -> None:
        """Sets the sparsity of the model to that after so many steps or epochs."""
        assert self._ramp is not None, "start() comes first"
        self._ramp.check_optimizer()
        self._ramp.move_to(steps if self.every == "step" else epochs)

    @property
    def sparsity(self) -> float | None:
        """The sparsity at this point in time; None before the start."""
        return None if self._ramp is None else self._ramp.sparsity
