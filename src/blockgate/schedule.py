"""Sparsity over time: set it for a whole model, or let it rise while training goes on; and falling temperatures."""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from blockgate.errors import BlockgateWarning, invalid
from blockgate.find import check_patterns, first_match, gate_names
from blockgate.gates.softmax_sum import check_temperature
from blockgate.grid import as_int, check_sparsity

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from blockgate.gates import Gate

__all__ = ["RAMP_SHAPES", "SparsityRamp", "TemperatureRamp", "set_sparsity", "warn_of_rounding"]

# How far the share of closed blocks may be from the sparsity that was asked for, without a word.
MOST_ROUNDING = 0.05
# So many different grids are named in a warning.
LISTED = 3

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
    wanted = _wanted(model, sparsity)
    _set(wanted)
    warn_of_rounding(wanted, stacklevel=3)


def warn_of_rounding(wanted: Mapping[Gate, float], stacklevel: int) -> None:
    """Warns once, with all layers in question, where whole blocks can't reach the sparsity that is wanted."""
    far = []
    for gate, sparsity in wanted.items():
        closed = 1 - gate.target_density * gate.count_open(sparsity) / gate.open_blocks
        if abs(closed - sparsity) > MOST_ROUNDING:
            blocks = f"{gate.grid.out_blocks}x{gate.grid.in_blocks} blocks"
            far.append(f"sparsity {sparsity:g} closes {closed:.1%} of {blocks}")
    if far:
        grids = dict.fromkeys(far)
        listed = [*list(grids)[:LISTED], *(["..."] if len(grids) > LISTED else [])]
        warnings.warn(
            f"{len(far)} of {len(wanted)} gates can't reach the sparsity that was asked for, since only whole "
            f"blocks open: {'; '.join(listed)}. Take thinner blocks, such as block_size=(256, 8), or another sparsity.",
            BlockgateWarning,
            stacklevel=stacklevel,
        )


def _wanted(model: nn.Module, sparsity: float | Mapping[str, float]) -> dict[Gate, float]:
    """What each gate is to have; raises if one of them can't."""
    patterns = sparsity if isinstance(sparsity, Mapping) else {"*": sparsity}
    for value in patterns.values():
        check_sparsity(value)
    gates = gate_names(model)
    check_patterns(patterns, list(gates.values()))
    wanted = {gate: match[1] for gate, names in gates.items() if (match := first_match(patterns, names))}
    for gate, value in wanted.items():
        gate.count_open(value)
    return wanted


def _set(wanted: Mapping[Gate, float]) -> None:
    for gate, value in wanted.items():
        gate.target_sparsity = value


class _Ramp(ABC):
    """What moves something of a model between two points in time, and goes on from a checkpoint."""

    def __init__(self, model: nn.Module, begin: int, end: int, layers: str) -> None:
        first, last = as_int(begin), as_int(end)
        if first is None or last is None or not 0 <= first <= last:
            raise invalid("begin and end", expected="0 <= begin <= end", got=(begin, end), remedy="Count steps from 0.")
        self.model, self.begin, self.end, self.layers = model, first, last, layers
        self.steps_done = 0

    @abstractmethod
    def _apply(self) -> float:
        """Sets in the model what holds after `steps_done` steps, and returns it."""

    def _way(self, step: int) -> float:
        """The share of the time between `begin` and `end` that has passed."""
        if step >= self.end:
            return 1.0
        return 0.0 if step <= self.begin else (step - self.begin) / (self.end - self.begin)

    def step(self) -> float:
        """Moves one step on, sets the model accordingly, and returns what it has set."""
        return self.move_to(self.steps_done + 1)

    def move_to(self, step: int) -> float:
        """Sets the model to what holds after `step` steps, and returns it: for clocks that others keep."""
        self.steps_done = step
        return self._apply()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on from here."""
        return {"steps_done": self.steps_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint: takes the step and sets the model accordingly."""
        steps = as_int(state.get("steps_done")) if isinstance(state, dict) else None
        if steps is None or steps < 0:
            raise invalid(
                "ramp state", expected="a dict with steps_done >= 0", got=state, remedy="Load what state_dict() gave."
            )
        self.move_to(steps)


class SparsityRamp(_Ramp):
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
        super().__init__(model, begin, end, layers)
        if not isinstance(shape, str) or shape not in RAMP_SHAPES:
            raise invalid(
                "shape", expected=f"one of {tuple(RAMP_SHAPES)}", got=shape, remedy="The paper's is 'linear'."
            )
        self.initial = check_sparsity(initial, "initial")
        self.final = check_sparsity(final, "final")
        self.shape = shape
        self._apply()
        warn_of_rounding(_wanted(model, {layers: self.final}), stacklevel=3)
        self._trained: set[int] | None = set()
        _note_training(self)

    @property
    def sparsity(self) -> float:
        """The sparsity at this point in time."""
        return self.sparsity_at(self.steps_done)

    def sparsity_at(self, step: int) -> float:
        """The sparsity after `step` steps."""
        way = self._way(step)
        return self.final if way == 1 else self.initial + (self.final - self.initial) * RAMP_SHAPES[self.shape](way)

    def step(self) -> float:
        """Moves one step on, sets the sparsity of the model, and returns it."""
        self.check_optimizer(stacklevel=3)
        return super().step()

    def check_optimizer(self, *, stacklevel: int = 2) -> None:
        """Warns, once, if the optimizers that have stepped so far train the model but none of its gates.

        `step` does it; call it beside `move_to`. Nothing happens before an optimizer has stepped.
        """
        if self._trained is None:
            return
        gates = {id(p) for gate in gate_names(self.model) for p in gate.parameters() if p.requires_grad}
        others = {id(p) for p in self.model.parameters()} - gates
        if not self._trained & (gates | others):
            return
        trained, self._trained = self._trained, None
        if (stop := _watching.pop(self, None)) is not None:
            stop()
        if gates and not trained & gates:
            warnings.warn(
                "the optimizer trains the model but none of its gates: they are new parameters, which an optimizer "
                "made before sparsify_ doesn't know. Make the optimizer from model.parameters() after sparsify_.",
                BlockgateWarning,
                stacklevel=stacklevel + 1,
            )

    def _apply(self) -> float:
        _set(_wanted(self.model, {self.layers: self.sparsity}))
        return self.sparsity


@runtime_checkable
class _Annealed(Protocol):
    """A gate that anneals: all kinds with a `temperature` that can be set."""

    temperature: float


class TemperatureRamp(_Ramp):
    """Lowers the temperature of gates that have one (`gate="softmax_sum"`) by the same factor in every step.

    Heads that are trained soft then come to choose one block each, as they do in eval. Call `step()` once per update or
    once per epoch, and give `begin` and `end` in the same unit. The temperature is set at once when the ramp is made.

    Args:
        model: any module with gated layers; gates without a temperature stay as they are.
        begin: the last step that still has the initial temperature.
        end: the first step with the final temperature.
        initial: temperature before the ramp.
        final: temperature at the end.
        layers: name pattern of the layers that it moves, as in `set_sparsity`; one ramp for each group of layers.
    """

    def __init__(
        self,
        model: nn.Module,
        begin: int,
        end: int,
        *,
        initial: float = 1.0,
        final: float = 0.1,
        layers: str = "*",
    ) -> None:
        super().__init__(model, begin, end, layers)
        self.initial = check_temperature(initial, "initial")
        self.final = check_temperature(final, "final")
        self._apply()

    @property
    def temperature(self) -> float:
        """The temperature at this point in time."""
        return self.temperature_at(self.steps_done)

    def temperature_at(self, step: int) -> float:
        """The temperature after `step` steps."""
        way = self._way(step)
        return self.final if way == 1 else self.initial * (self.final / self.initial) ** way

    def _apply(self) -> float:
        names = gate_names(self.model)
        check_patterns({self.layers: None}, list(names.values()))
        annealed = [g for g, of in names.items() if isinstance(g, _Annealed) and first_match({self.layers: None}, of)]
        if not annealed:
            kinds = sorted({gate.kind for gate in names})
            raise invalid(
                "temperature",
                expected="a model with gates that have one",
                got=f"gates of the kinds {', '.join(kinds)}",
                remedy="Use gate='softmax_sum', or no TemperatureRamp.",
            )
        for gate in annealed:
            gate.temperature = self.temperature
        return self.temperature


# What ends the watch of a ramp over optimizers. Not in the ramp itself, which may be copied and pickled.
_watching: WeakKeyDictionary[SparsityRamp, Callable[[], Any]] = WeakKeyDictionary()


def _note_training(ramp: SparsityRamp) -> None:
    """Collects the identities of the parameters that optimizers train, until the ramp has checked them or is gone."""
    reference = weakref.ref(ramp)

    def note(optimizer: Optimizer, *_: Any) -> None:
        ramp = reference()
        if ramp is not None and ramp._trained is not None:
            ramp._trained |= {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    _watching[ramp] = weakref.finalize(ramp, register_optimizer_step_post_hook(note).remove)
