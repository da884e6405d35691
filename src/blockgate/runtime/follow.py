"""Values that follow parameters: made from them on first use, and made again once one of them has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch.optim.optimizer import register_optimizer_step_post_hook

from blockgate.runtime.plan import INFERENCE_WEIGHTS, Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["Followed"]

Value = TypeVar("Value")

# How often an optimizer has stepped a parameter, by the parameter's id: fused optimizers leave no other trace. An id
# may pass to another tensor; its count then goes on, and nothing else is asked of it than to change.
_steps: dict[int, int] = {}
_watching = False


def _watch_optimizers() -> None:
    global _watching
    if not _watching:
        register_optimizer_step_post_hook(_count_step)
        _watching = True


def _count_step(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _steps[id(parameter)] = _steps.get(id(parameter), 0) + 1


class Followed(Generic[Value]):
    """A value made from tensors, or the reason why none can be made of them.

    A change is another tensor, other memory, a higher version counter, or a step of the optimizer that holds the
    tensor; `drop` covers the rest. Copies and pickles start empty. Threads may race to make the value: each gets a
    right one.
    """

    def __init__(self) -> None:
        self._state: tuple[list[Any], Value | Refusal, list[Any]] | None = None

    def get(
        self, sources: Sequence[Tensor | None], options: Sequence[object], make: Callable[[], Value | Refusal]
    ) -> Value | Refusal:
        """The value for these sources and options (compared by identity), from `make` if it isn't there or is stale."""
        marks = [id(option) for option in options]
        try:
            for t in sources:
                if t is not None:
                    number = id(t)
                    marks += (number, t.data_ptr(), t._version, _steps.get(number, 0))
        except RuntimeError:  # an inference tensor has no version counter
            return INFERENCE_WEIGHTS
        state = self._state
        if state is not None and state[0] == marks:
            return state[1]
        _watch_optimizers()
        value = make()
        # Holding options and memory keeps their ids and addresses from being given to others.
        self._state = (marks, value, [*options, *(t.detach() for t in sources if t is not None)])
        return value

    def drop(self) -> None:
        """Forgets the value."""
        self._state = None

    def __reduce__(self) -> tuple[type[Followed[Any]], tuple[()]]:
        return Followed, ()
