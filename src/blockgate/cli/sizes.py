"""Sizes of layers and blocks, as options give them."""

from __future__ import annotations

from blockgate.errors import invalid

__all__ = ["parse_block", "parse_shape"]


def parse_shape(text: str) -> tuple[int, int]:
    """(out, in) from "OUTxIN"."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise invalid("--shapes", expected="OUTxIN such as 6144x1536", got=text, remedy="Give positive sizes.")
    return int(parts[0]), int(parts[1])


def parse_block(text: str) -> int | tuple[int, int]:
    """A block size from "128" or "OUTxIN"."""
    if text.isdigit() and int(text) > 0:
        return int(text)
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise invalid("--block", expected="a size from 1 on, or OUTxIN", got=text, remedy="Try --block 128 256x16.")
    return int(parts[0]), int(parts[1])
