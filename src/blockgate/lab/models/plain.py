"""Configuration dataclasses as plain data for JSON and checkpoints, and back, every value checked.

Our own, because the libraries that do this (dacite, cattrs, mashumaro) name neither the place nor the remedy in errors,
and none of them is a dependency yet.
"""

from __future__ import annotations

import types
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from blockgate.errors import invalid

__all__ = ["from_plain", "to_plain"]

Config = TypeVar("Config")


def to_plain(config: Any) -> dict[str, Any]:
    """A dataclass as nested dicts of what JSON knows; paths become text, tuples lists."""
    return {name: _plain(value) for name, value in asdict(config).items()}


def from_plain(kind: type[Config], data: dict[str, Any], default: Config | None = None, at: str = "") -> Config:
    """The dataclass `kind` from nested dicts. What is left out keeps its default; unknown names and types are refused.

    Args:
        kind: a dataclass with a default for every field.
        data: as `to_plain` made it, or written by hand.
        default: where to take what is left out from; `kind()` if None.
        at: where `data` stands, for error messages.
    """
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if not isinstance(data, dict) or not set(data) <= set(names):
        got = sorted(set(data) - set(names)) if isinstance(data, dict) else data
        raise invalid(f"config{at}", expected=f"some of {names}", got=got, remedy="Check the spelling.")
    base = kind() if default is None else default
    values = {name: getattr(base, name) for name in names}
    for name, value in data.items():
        if is_dataclass(hints[name]):
            values[name] = from_plain(hints[name], value, values[name], f"{at}.{name}")
        else:
            values[name] = _value(hints[name], value, f"{at}.{name}")
    return kind(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def _value(hint: Any, value: Any, at: str) -> Any:
    """`value` as the type that a field declares."""
    for option in get_args(hint) if get_origin(hint) in {Union, types.UnionType} else (hint,):
        if get_origin(option) is Literal and value in get_args(option) and not isinstance(value, bool):
            return value
        if get_origin(option) is tuple and isinstance(value, (list, tuple)):
            return tuple(_value(get_args(option)[0], inner, at) for inner in value)
        if option is Path and isinstance(value, str):
            return Path(value)
        if option is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        # bool is an int to Python, not to us.
        if option in {int, str, bool, types.NoneType} and type(value) is option:
            return value
    expected = getattr(hint, "__name__", None) if isinstance(hint, type) else str(hint)
    raise invalid(f"config{at}", expected=f"{expected}", got=value, remedy="Correct the value.")
