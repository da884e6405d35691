"""Layers by name: one rule for every call that takes name patterns."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeVar

from blockgate.errors import invalid

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["check_patterns", "first_match", "matches"]

Value = TypeVar("Value")


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` names a module, or one that contains it.

    Patterns are those of a shell (`*`, `?`, `[...]`); `*` reaches across dots. "encoder" and "encoder.*" both mean all
    that is inside of `encoder`; "*.linear1" means every `linear1` below the top.
    """
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:length]), pattern) for length in range(1, len(parts) + 1))


def first_match(patterns: Mapping[str, Value], names: Iterable[str]) -> tuple[str, Value] | None:
    """The first pattern that matches one of a module's names, and what it maps to."""
    names = list(names)
    return next(((p, value) for p, value in patterns.items() if any(matches(p, name) for name in names)), None)


def check_patterns(patterns: Mapping[str, object], names: Iterable[str]) -> None:
    """Raises a clear error if a pattern matches none of the names: it is a slip of the pen."""
    names = list(names)
    for pattern in patterns:
        if not isinstance(pattern, str) or not any(matches(pattern, name) for name in names):
            shown = ", ".join(map(repr, names[:12])) + (", ..." if len(names) > 12 else "")
            raise invalid(
                "name pattern", expected=f"one that matches a layer: {shown}", got=pattern, remedy="'*' matches all."
            )
