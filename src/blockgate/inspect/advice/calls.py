"""What a model asks of its layers: the shapes of their inputs and how often they come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from blockgate.convert.closeness import run_example

__all__ = ["Calls", "see_calls"]

# How often a layer is called with an input of each shape.
Calls = Counter[tuple[int, ...]]


def see_calls(model: nn.Module, layers: Iterable[nn.Module], example: Any) -> dict[nn.Module, Calls]:
    """Runs the model once on an example, and counts the calls of each of these layers."""
    found: dict[nn.Module, Calls] = {layer: Counter() for layer in layers}

    def see(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if x is not None:
            found[layer][tuple(x.shape)] += 1

    with ExitStack() as stack:
        for layer in found:
            stack.callback(layer.register_forward_pre_hook(see, with_kwargs=True).remove)
        run_example(model, example)
    return found
