"""Layers of a model exchanged for others, in place, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockgate.convert.shortcuts import use_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

__all__ = ["replace_layers"]


def replace_layers(model: nn.Module, made: Mapping[nn.Module, nn.Module]) -> Callable[[], None]:
    """Puts every `made[layer]` in the place of `layer`, wherever in `model` it occurs.

    Returns:
        A function that takes the change back.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and child in made
    ]
    for parent, name, child in places:
        parent._modules[name] = made[child]
    undo_shortcuts = use_layers(model)

    def undo() -> None:
        undo_shortcuts()
        for parent, name, child in places:
            parent._modules[name] = child

    return undo
