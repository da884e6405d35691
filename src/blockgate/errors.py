"""The exceptions that blockgate raises. Each message says what was expected, what came, and what to do."""

from __future__ import annotations

__all__ = ["BackendError", "BlockgateError", "BlockgateWarning", "InvalidInputError", "invalid", "missing_extra"]


class BlockgateError(Exception):
    """Base of every exception that blockgate raises on purpose."""


class InvalidInputError(BlockgateError, ValueError):
    """An argument, a shape or a file that blockgate can't work with."""


class BackendError(BlockgateError, RuntimeError):
    """A backend was asked for by name and can't run here."""


class BlockgateWarning(UserWarning):
    """Something works, but probably not as intended."""


def invalid(what: str, *, expected: str, got: object, remedy: str) -> InvalidInputError:
    """The one form of our messages: `what`, what was expected, what came, what to do."""
    return InvalidInputError(f"{what}: expected {expected}, got {got!r}. {remedy}")


def missing_extra(what: str, error: ImportError) -> BlockgateError:
    """For a part of blockgate that needs a package which `import blockgate` doesn't."""
    return BlockgateError(f"{what} needs {error.name}. Run: pip install 'blockgate[train]'")
