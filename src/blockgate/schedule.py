"""Sparsity over time: set it for a whole model, or let it rise while training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from blockgate.errors import invalid
from blockgate.find import check_patterns, first_match, gate_names
from blockgate.grid import as_int, check_sparsity

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RAMP_SHAPES", "SparsityRamp", "set_sparsity"]

# The share of the way from the initial to the final sparsity, after a share t of the time.
RAMP_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda t: t,
    "cubic": lambda t: 1 - (1 - t) ** 3,
}


def set_sparsity(model: nn.Module, sparsity: float | Mapping[str, float]) -> None:
    """Sets the sparsity of the gates in `model`. All change, or, if one of them can't, none does.

    Args:
        model: any module with gated layers.
        sparsity: in [0, 1), for every gate; or a mapping from name patterns to sparsities, such as
            {"encoder.*": 0.75, "*.linear2": 0.5}. The first pattern that matches the name of a layer, or of a module
            that contains it, counts; other layers stay as they are. A pattern that counts for no layer is an error.
    """
    patterns = sparsity if isinstance(sparsity, Mapping) else {"*": sparsity}
    for value in patterns.values():
        check_sparsity(value)
    gates = gate_names(model)
    check_patterns(patterns, list(gates.values()))
    wanted = {gate: match[1] for gate, names in gates.items() if (match := first_match(patterns, names))}
    for gate, value in wanted.items():
        gate.count_open(value)
    for gate, value in wanted.items():
        gate.target_sparsity = value


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
        layers: name pattern of the layers that it moves, as in `set_sparsity`; one ramp for each group of layers.
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
        layers: str = "*",
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
        self.layers = layers
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
        return self.move_to(self.steps_done + 1)

    def move_to(self, step: int) -> float:
        """Sets the sparsity of the model to that after `step` steps, and returns it: for clocks that others keep."""
        self.steps_done = step
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
        self.move_to(steps)

    def _apply(self) -> None:
        set_sparsity(self.model, {self.layers: self.sparsity})
