"""Files that are written whole or not at all: readers see the old one or the new one, whatever happens meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replace_whole", "write_whole"]


@contextmanager
def replace_whole(path: Path) -> Iterator[Path]:
    """Gives a path beside `path` to write to, and puts what was written there in its place when the block ends.

    If the block raises, `path` stays as it was and nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        with temporary.open("r+b") as stream:
            # Without this, a machine that loses power may keep the new name and lose the bytes.
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, data: str | bytes) -> None:
    """Writes a file of these bytes, or of this text in UTF-8; folders that are missing are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_whole(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
