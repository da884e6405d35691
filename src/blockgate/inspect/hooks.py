"""How this room sees decisions: hooks on gates that leave no trace."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockgate.gates import Gate
from blockgate.gates.recompute import in_backward
from blockgate.gates.turn import present_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["watch"]


@contextmanager
def watch(gates: dict[str, Gate], see: Callable[[str, Gate, Tensor, Tensor, Tensor], None]) -> Iterator[None]:
    """While it lasts, every decision of every gate goes to `see`: name, gate, x (N, in), values and indices (N, E)."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            # Code that was compiled before the hooks came would run without them.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, gate in gates.items():
            handle = gate.register_forward_hook(_Hook(name, see))
            stack.callback(handle.remove)
        yield


class _Hook:
    """Passes on what one gate decides. A copy or a pickle of the model must not: there it becomes a leftover."""

    def __init__(self, name: str, see: Callable[[str, Gate, Tensor, Tensor, Tensor], None]) -> None:
        self.name = name
        self.see = see

    def __call__(self, gate: Gate, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        if in_backward():
            return
        if (turn := present_turn()) is None:
            self.tell(gate, inputs[0], *output)
        else:
            turn.hold(self, gate, inputs[0], *output)

    def tell(self, gate: Gate, x: Tensor, values: Tensor, indices: Tensor) -> None:
        """Passes on what the gate decided on rows x (N, in), in the order of their sequences."""
        self.see(self.name, gate, x, values, indices)

    def __reduce__(self) -> tuple[type[_Leftover], tuple[()]]:
        return _Leftover, ()


class _Leftover:
    """A hook on the copy of a watched gate. It goes at its first call, since gates with hooks miss the fast path."""

    def __call__(self, gate: Gate, *_: Any) -> None:
        hooks = gate._forward_hooks
        for key in [key for key, hook in hooks.items() if hook is self]:
            del hooks[key]
