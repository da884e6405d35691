"""Layers by name: one rule for every call that takes name patterns."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeVar

from blockgate.errors import invalid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["check_patterns", "first_match", "matches"]

Value = TypeVar("Value")


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` names a module, or one that contains it.

    Patterns are those of a shell (`*`, `?`, `[...]`); `*` reaches across dots. "encoder" and "encoder.*" both mean all
    that is inside of `encoder`; "*.linear1" means every `linear1` below the top.
    """
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:length]), pattern) for length in range(1, len(parts) + 1))


def first_match(patterns: Mapping[str, Value], names: Sequence[str]) -> tuple[str, Value] | None:
    """The first pattern that matches one of a module's names, and what it maps to."""
    return next(((p, value) for p, value in patterns.items() if any(matches(p, name) for name in names)), None)


def check_patterns(patterns: Mapping[str, object], layers: Sequence[Sequence[str]]) -> None:
    """Raises a clear error if a pattern comes first for no layer (each given by its names): it would do nothing."""
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise invalid("name pattern", expected="a string", got=pattern, remedy="'*' matches all.")
    used = {match[0] for names in layers if (match := first_match(patterns, names))}
    for pattern in patterns:
        if pattern in used:
            continue
        shown = ", ".join(repr(names[0]) for names in layers[:12]) + (", ..." if len(layers) > 12 else "")
        hidden = any(matches(pattern, name) for names in layers for name in names)
        raise invalid(
            "name pattern",
            expected="one that matches before another does" if hidden else f"one that matches a layer: {shown}",
            got=pattern,
            remedy="Put it before the wider patterns." if hidden else "'*' matches all.",
        )
