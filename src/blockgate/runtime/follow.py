"""Values that follow parameters: made from them on first use, and made again once one of them has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from blockgate.runtime.plan import INFERENCE_WEIGHTS, Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["Followed", "versions_refusal"]

Value = TypeVar("Value")

# How often an optimizer has stepped the memory at an address, for the addresses that somebody follows: fused optimizers
# leave no other trace. By address, since an optimizer may hold another tensor on the same memory.
_steps: dict[int, int] = {}
_watching = False

# Torch's fused steps, which some call without an optimizer: alone among operations in place they raise no version
# counter. The key of the dispatcher where others do so is free for them.
_FUSED = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")
_library = torch.library.Library("aten", "IMPL")


def _watch_optimizers(copied: Sequence[Tensor]) -> None:
    global _watching
    for tensor in copied:
        _steps.setdefault(tensor.data_ptr(), 0)
    if not _watching:
        _watching = True
        register_optimizer_step_post_hook(_count_step)
        for packet in (getattr(torch.ops.aten, name) for name in _FUSED):
            for name in packet.overloads():
                fused = getattr(packet, name)
                _library.impl(fused, _counting(fused), "ADInplaceOrView", with_keyset=True)


def _counting(fused: Any) -> Any:
    """A fused step that counts the memory it changes."""
    rest = torch._C._after_ADInplaceOrView_keyset

    def run(keys: Any, parameters: Sequence[Tensor], *others: Any, **named: Any) -> Any:
        result = fused.redispatch(keys & rest, parameters, *others, **named)
        for parameter in parameters:
            # Others, such as those that are only traced, have no memory.
            if type(parameter) in {torch.Tensor, nn.Parameter}:
                _count(parameter)
        return result

    return run


def _count_step(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _count(parameter)


def _count(parameter: Tensor) -> None:
    address = parameter.data_ptr()
    if address in _steps:
        _steps[address] += 1


class Followed(Generic[Value]):
    """A value made from tensors and other objects, or the reason why none can be made of them.

    Objects are followed by identity. Tensors of which the value holds a copy are followed by their content too: other
    memory, a higher version counter, or a step of the optimizer that holds them is a change; `drop` covers the rest.
    Copies and pickles start empty. Threads may race to make the value: each gets a right one.
    """

    def __init__(self) -> None:
        # The identities of the objects, the state of the copied tensors, the value, and what keeps both alive: held
        # objects and held memory keep their ids and addresses from being given to others.
        self._state: tuple[list[int], list[int], Value, list[Tensor], tuple[object, ...]] | None = None

    def get(
        self,
        objects: tuple[object, ...],
        copied: Callable[[], list[Tensor]],
        make: Callable[[], Value | Refusal],
    ) -> Value | Refusal:
        """The value for these objects, from `make` if it isn't there or is stale. Runs before every small product.

        `copied` tells which tensors, among the objects, a value copies.
        """
        ids, state = [*map(id, objects)], self._state
        if state is not None and state[0] == ids and state[1] == _contents(state[3]):
            return state[2]
        # The old value goes first: its memory may serve for the new one.
        self._state = state = None
        made = make()
        if isinstance(made, Refusal):
            return made
        tensors = copied()
        _watch_optimizers(tensors)
        memory = tuple(t.detach() for t in tensors)
        self._state = (ids, _contents(tensors), made, tensors, (objects, memory))
        return made

    def drop(self) -> None:
        """Forgets the value."""
        self._state = None

    def __reduce__(self) -> tuple[type[Followed[Any]], tuple[()]]:
        return Followed, ()


def _contents(tensors: list[Tensor]) -> list[int]:
    """Numbers that change whenever the content of a tensor does, as far as torch can see it."""
    found: list[int] = []
    for t in tensors:
        address = t.data_ptr()
        found += (address, t._version, _steps.get(address, 0))
    return found


def versions_refusal(copied: Sequence[Tensor]) -> Refusal | None:
    """Whether edits of these tensors would go unseen: they were made in inference mode."""
    return INFERENCE_WEIGHTS if any(t.is_inference() for t in copied) else None
