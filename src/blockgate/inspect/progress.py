"""Progress of long measurements: told to a function of the caller's, or shown as a bar."""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from blockgate.errors import BlockgateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Progress", "Report", "reporting"]

# Called with how much is done, and of how much.
Report: TypeAlias = "Callable[[int, int], None]"
# What callers may pass.
Progress: TypeAlias = "Report | bool | None"


@contextmanager
def reporting(progress: Progress, what: str) -> Iterator[Report]:
    """What to call with how much is done, and of how much; while it lasts, a bar is shown if `progress` is True."""
    if not isinstance(progress, bool):
        yield progress or (lambda _done, _of: None)
    elif not progress:
        yield lambda _done, _of: None
    else:
        if importlib.util.find_spec("rich") is None:
            raise BlockgateError("progress=True: expected rich, got none. Run: pip install 'blockgate[train]'")
        from rich.progress import Progress as Bar

        with Bar() as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, of: bar.update(task, completed=done, total=of)
