"""Sparsity over time: set it for a whole model, or let it rise while training goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from blockgate.errors import invalid
from blockgate.gating import Gate
from blockgate.grid import as_int, check_sparsity

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RAMP_SHAPES", "SparsityRamp", "set_sparsity"]

# The share of the way from the initial to the final sparsity, after a share t of the time.
RAMP_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda t: t,
    "cubic": lambda t: 1 - (1 - t) ** 3,
}


def set_sparsity(model: nn.Module, sparsity: float) -> None:
    """Sets the sparsity of every gate in `model`. All change, or, if one of them can't, none does."""
    check_sparsity(sparsity)
    gates = [module for module in model.modules() if isinstance(module, Gate)] if isinstance(model, nn.Module) else []
    if not gates:
        raise invalid(
            "set_sparsity",
            expected="a model with gated layers",
            got=type(model).__name__,
            remedy="Build it with bg.DynamicSparseLinear, or convert its layers first.",
        )
    for gate in gates:
        gate.count_open(sparsity)
    for gate in gates:
        gate.target_sparsity = sparsity


class SparsityRamp:
    """Moves the sparsity of a model from `initial` to `final` between two points in time.

    Time is what you count: call `step()` once per epoch or once per batch, and give `begin` and `end` in the same
    unit. The sparsity is `initial` up to `begin`, `final` from `end` on, and is set at once when the ramp is made.

    Args:
        model: any module with gated layers.
        final: sparsity at the end, in [0, 1).
        begin: the last step that still has the initial sparsity.
        end: the first step with the final sparsity.
        shape: "linear" (the paper's) or "cubic" (fast at first, as in gradual magnitude pruning).
        initial: sparsity before the ramp, in [0, 1).
    """

    def __init__(
        self,
        model: nn.Module,
        final: float,
        begin: int,
        end: int,
        shape: str = "linear",
        *,
        initial: float = 0.0,
    ) -> None:
        first, last = as_int(begin), as_int(end)
        if first is None or last is None or not 0 <= first <= last:
            raise invalid("begin and end", expected="0 <= begin <= end", got=(begin, end), remedy="Count steps from 0.")
        if not isinstance(shape, str) or shape not in RAMP_SHAPES:
            raise invalid(
                "shape", expected=f"one of {tuple(RAMP_SHAPES)}", got=shape, remedy="The paper's is 'linear'."
            )
        self.model = model
        self.initial = check_sparsity(initial, "initial")
        self.final = check_sparsity(final, "final")
        self.begin = first
        self.end = last
        self.shape = shape
        self.steps_done = 0
        self._apply()

    @property
    def sparsity(self) -> float:
        """The sparsity at this point in time."""
        return self.sparsity_at(self.steps_done)

    def sparsity_at(self, step: int) -> float:
        """The sparsity after `step` steps."""
        if step >= self.end:
            return self.final
        if step <= self.begin:
            return self.initial
        way = RAMP_SHAPES[self.shape]((step - self.begin) / (self.end - self.begin))
        return self.initial + (self.final - self.initial) * way

    def step(self) -> float:
        """Moves one step on, sets the sparsity of the model, and returns it."""
        self.steps_done += 1
        self._apply()
        return self.sparsity

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on from here."""
        return {"steps_done": self.steps_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint: takes the step and sets the sparsity of the model."""
        steps = as_int(state.get("steps_done")) if isinstance(state, dict) else None
        if steps is None or steps < 0:
            raise invalid(
                "ramp state", expected="a dict with steps_done >= 0", got=state, remedy="Load what state_dict() gave."
            )
        self.steps_done = steps
        self._apply()

    def _apply(self) -> None:
        set_sparsity(self.model, self.sparsity)
