"""How this room sees decisions: the gates of a model by name, and hooks on them that leave no trace."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockgate.errors import invalid
from blockgate.gates import Gate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["gate_label", "named_gates", "watch"]


def named_gates(model: nn.Module) -> dict[str, Gate]:
    """The gates of `model`, each once, under the names that reports use; at least one."""
    found = model.named_modules() if isinstance(model, nn.Module) else ()
    gates = {gate_label(path): module for path, module in found if isinstance(module, Gate)}
    if not gates:
        raise invalid(
            "model",
            expected="one with gated layers",
            got=type(model).__name__,
            remedy="Build it with bg.DynamicSparseLinear, or convert its layers first.",
        )
    return gates


def gate_label(path: str) -> str:
    """The name that reports use for the gate at `path`: fc.gate is fc, lstm.gate_ih_l0 is lstm.ih_l0."""
    owner, _, name = path.rpartition(".")
    if name == "gate":
        return owner or path
    return ".".join(part for part in (owner, name.removeprefix("gate_")) if part)


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
        self.see(self.name, gate, inputs[0], *output)

    def __reduce__(self) -> tuple[type[_Leftover], tuple[()]]:
        return _Leftover, ()


class _Leftover:
    """A hook on the copy of a watched gate. It goes at its first call, since gates with hooks miss the fast path."""

    def __call__(self, gate: Gate, *_: Any) -> None:
        hooks = gate._forward_hooks
        for key in [key for key, hook in hooks.items() if hook is self]:
            del hooks[key]
