"""Torch's transformers have shortcuts that read `linear.weight` and go around the layer: here they are turned off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from blockgate.runtime.block_linear import BlockLinear

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["use_layers"]


def use_layers(model: nn.Module) -> Callable[[], None]:
    """Makes torch's transformers in `model` that hold layers of ours call them, in eval as in training.

    Returns:
        A function that takes the change back.
    """
    changed: list[tuple[nn.Module, str, object]] = []

    def turn_off(module: nn.Module, switch: str, off: object) -> None:
        changed.append((module, switch, getattr(module, switch)))
        setattr(module, switch, off)

    for module in model.modules():
        if not isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer)):
            continue
        if any(isinstance(inner, BlockLinear) for inner in module.modules()):
            if isinstance(module, nn.TransformerEncoder):
                turn_off(module, "use_nested_tensor", False)
            else:
                turn_off(module, "activation_relu_or_gelu", 0)

    def undo() -> None:
        for module, switch, value in changed:
            setattr(module, switch, value)

    return undo
