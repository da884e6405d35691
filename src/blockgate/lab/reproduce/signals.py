"""What a signal does, for as long as a `with` block lasts."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["handling"]


@contextmanager
def handling(number: int, handler: Any) -> Iterator[None]:
    """Lets a signal do something else; outside of the main thread, where that is impossible, it goes on as before."""
    try:
        before = signal.signal(number, handler)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(number, before)
