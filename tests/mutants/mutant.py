"""What a deliberate fault is."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["REPLACED", "SELFTEST", "Mutant", "native", "python"]

SELFTEST = "tests/lab/selftest/test_selftest.py"
REPLACED = "tests/runtime/test_replaced.py"


class Mutant(NamedTuple):
    """One fault."""

    file: str
    within: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def native(self) -> bool:
        """Whether it needs a build."""
        return "/csrc/" in self.file

    def __str__(self) -> str:
        return f"{self.file.removeprefix('src/blockgate/')}: {self.old} -> {self.new}"


def native(file: str, within: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(f"src/blockgate/csrc/{file}", within, old, new, tests or (SELFTEST,))


def python(file: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(f"src/blockgate/{file}", old, old, new, tests)
