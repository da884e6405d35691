"""A callback for the Trainer of Hugging Face's transformers: raises the sparsity of a model while it trains."""

from __future__ import annotations

import math
from typing import Any

from blockgate.errors import BlockgateError
from blockgate.integrations.clock import TrainerRamp

try:
    from transformers import TrainerCallback

    # Registers what loads gated models.
    from blockgate.integrations import quantizer
except ImportError as error:
    raise BlockgateError(
        "integrations.huggingface: expected the package transformers, got none. "
        "Install it with pip install transformers."
    ) from error

__all__ = ["SparsityCallback", "quantizer"]


class SparsityCallback(TrainerCallback):  # type: ignore[misc]
    """Moves the sparsity of all gated layers along a `SparsityRamp`, and adds it to the log as "sparsity".

    The ramp follows the Trainer's own count of optimizer steps or epochs, so a run that resumes from a checkpoint goes
    on where it was.

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

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **others: Any) -> None:
        """Starts the ramp where the trainer stands."""
        self._ramp.start(others["model"])
        self._follow(state)

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Sets the sparsity of the next step; the last one of an epoch has counted it."""
        self._follow(state)

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Adds the sparsity to what is logged, in the trainer's history and for the callbacks that come after."""
        if self._ramp.sparsity is None:
            return
        for entry in (logs, *state.log_history[-1:]):
            if entry is not None:
                entry[self.name] = self._ramp.sparsity

    def _follow(self, state: Any) -> None:
        # The trainer counts epochs in fractions, which may end a little below a whole number.
        self._ramp.follow(steps=state.global_step, epochs=math.floor((state.epoch or 0.0) + 1e-6))
