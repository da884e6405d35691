"""Models that a checkpoint can name, so that nobody has to build them by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from blockgate.errors import invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["build_model", "check_registered", "register_model"]

_constructors: dict[str, Callable[..., nn.Module]] = {}


def register_model(name: str, constructor: Callable[..., nn.Module]) -> None:
    """Makes `constructor` known to checkpoints under `name`; its keyword arguments must be what JSON can hold."""
    known = _constructors.setdefault(name, constructor)
    if known is not constructor:
        raise invalid(
            "register_model", expected="a name that is free", got=name, remedy="Names of models are given once."
        )


def check_registered(name: str) -> None:
    """Raises a clear error if no model has this name."""
    if name not in _constructors:
        raise invalid(
            "constructor",
            expected=f"a registered model: {sorted(_constructors)}",
            got=name,
            remedy="Call register_model first, or pass the model to load_pretrained.",
        )


def build_model(name: str, options: Mapping[str, Any]) -> nn.Module:
    """The model of this name, with these options."""
    check_registered(name)
    return _constructors[name](**options)
