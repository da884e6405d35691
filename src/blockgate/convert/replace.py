"""Layers of a model exchanged for others, in place, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from blockgate.convert.shortcuts import use_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Place", "replace_layers"]


@dataclass(frozen=True, eq=False)
class Place:
    """One place in a model: an attribute of a module, which may hold a module or a function."""

    owner: nn.Module
    attribute: str

    def now(self) -> Any:
        """What is there."""
        return getattr(self.owner, self.attribute)

    def put(self, what: Any) -> None:
        """Puts something there; a module takes the turn of the one that it replaces."""
        if isinstance(what, nn.Module):
            if self.attribute not in self.owner._modules:
                setattr(self.owner, self.attribute, what)
            _set_module(self.owner, self.attribute, what)
            return
        # Where a module was, torch would refuse a function.
        self.owner._modules.pop(self.attribute, None)
        setattr(self.owner, self.attribute, what)


def _set_module(owner: nn.Module, name: str, module: nn.Module) -> None:
    owner._modules[name] = module
    if isinstance(owner, nn.TransformerDecoderLayer) and name == "activation":
        # A copy of this class replaces an activation that isn't in its __dict__ by ReLU.
        owner.__dict__[name] = module


def replace_layers(model: nn.Module, made: Mapping[Any, nn.Module]) -> Callable[[], None]:
    """Puts every `made[layer]` in the place of `layer`, wherever in `model` it occurs; a `Place` is one place only.

    Returns:
        A function that takes the change back.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and child in made
    ]
    single = [(place, place.now()) for place in made if isinstance(place, Place)]
    for parent, name, child in places:
        _set_module(parent, name, made[child])
    for place, _ in single:
        place.put(made[place])
    undo_shortcuts = use_layers(model)

    def undo() -> None:
        undo_shortcuts()
        for place, before in single:
            place.put(before)
        for parent, name, child in places:
            _set_module(parent, name, child)

    return undo
