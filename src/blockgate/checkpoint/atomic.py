"""Files that are written whole or not at all: readers see the old one or the new one, whatever happens meanwhile."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["remove_leftovers", "replace_whole", "system_errors", "write_whole"]


@contextmanager
def replace_whole(path: Path) -> Iterator[Path]:
    """Gives a path beside `path` to write to, and puts what was written there in its place when the block ends.

    If the block raises, `path` stays as it was and nothing is left behind. What killed processes left is removed.
    """
    remove_leftovers(path.parent, path.name)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        with temporary.open("r+b") as stream:
            # Without this, a machine that loses power may keep the new name and lose the bytes.
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def system_errors(path: Path) -> Iterator[None]:
    """Raises the system's own error where a library tells of it in its own words, as of a full disk."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        number = _system_number(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def _system_number(error: BaseException | None) -> int | None:
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        if told := re.search(r"os error (\d+)", str(error)):
            return int(told.group(1))
        error = error.__context__
    return None


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Removes files that processes of this machine, killed since, were writing to take the place of `name`."""
    if os.name != "posix":
        # Elsewhere nobody can be asked whether a process is alive.
        return
    for file in folder.glob(f".{glob.escape(name) if name != '*' else name}.*"):
        number = file.name.rpartition(".")[2]
        if number.isdecimal() and not _is_alive(int(number)):
            file.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def write_whole(path: Path, data: str | bytes) -> None:
    """Writes a file of these bytes, or of this text in UTF-8; folders that are missing are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_whole(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
