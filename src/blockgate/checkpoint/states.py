"""States of runs in files of torch: written whole, with a digest of everything in them, read without running code."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockgate.checkpoint.atomic import replace_whole, system_errors
from blockgate.errors import invalid

__all__ = ["content_digest", "read_state", "write_state"]

# Files of format 1 had no digest.
FORMAT = 2


def write_state(file: Path, state: dict[str, Any]) -> None:
    """Writes a state of tensors, numbers, text, lists and dicts; folders that are missing are made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replace_whole(file) as temporary, system_errors(file), temporary.open("wb") as stream:
        torch.save({"format": FORMAT, "digest": content_digest(state)} | state, stream)


def content_digest(state: object) -> str:
    """A digest of everything in a state of tensors, numbers, text, lists and dicts, in its order."""
    digest = hashlib.sha256()

    def add(value: object) -> None:
        if isinstance(value, Tensor):
            digest.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
            size = value.numel() * value.element_size()
            memory = value.untyped_storage()
            if size > memory.nbytes():
                # It repeats its memory, as expanded tensors do: spread out it could take any amount.
                digest.update(f"strides {value.stride()} from {value.storage_offset()};".encode())
                size, kept = memory.nbytes(), memory.cpu()
            else:
                kept = value.detach().cpu().contiguous()
            if size:
                digest.update((ctypes.c_char * size).from_address(kept.data_ptr()))
        elif isinstance(value, Mapping):
            digest.update(f"dict {len(value)};".encode())
            for key, entry in value.items():
                add(key)
                add(entry)
        elif isinstance(value, (list, tuple)):
            digest.update(f"list {len(value)};".encode())
            for entry in value:
                add(entry)
        else:
            digest.update(f"{type(value).__name__} {value!r};".encode())

    add(state)
    return digest.hexdigest()


def read_state(file: Path, *, writer: str, keys: Set[str], damaged: str, undigested: bool = False) -> dict[str, Any]:
    """Reads a state, on the CPU; one that was damaged since it was written is refused.

    Args:
        file: where it is.
        writer: what wrote it, for messages.
        keys: what it must hold.
        damaged: what to do if it was damaged.
        undigested: whether files of format 1 are read too.
    """
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise invalid(
            "checkpoint", expected="a file", got=f"{file}, which isn't there", remedy="Check the path."
        ) from None
    except Exception as error:
        # Whatever reading damaged bytes may raise.
        reason = " ".join(str(error).split())[:120]
        raise invalid(
            "checkpoint", expected=f"a file that {writer} wrote", got=f"{file} ({reason})", remedy=damaged
        ) from None
    formats = {1, FORMAT} if undigested else {FORMAT}
    found = state.get("format") if isinstance(state, dict) else None
    if type(found) is not int or found not in formats or not keys <= state.keys():
        got = repr(found) if isinstance(state, dict) else type(state).__name__
        raise invalid(
            "checkpoint",
            expected=f"format {' or '.join(map(str, sorted(formats)))} of {writer}",
            got=f"{file} with {got}",
            remedy=damaged,
        )
    if state.pop("format") == FORMAT and not _fits(state.pop("digest", None), state):
        raise invalid(
            "checkpoint", expected=f"what {writer} wrote", got=f"{file}, which was damaged since", remedy=damaged
        )
    checked: dict[str, Any] = state
    return checked


def _fits(digest: object, state: dict[str, Any]) -> bool:
    try:
        return digest == content_digest(state)
    except (RuntimeError, NotImplementedError, TypeError):
        # Nested without end, or tensors without memory: nobody wrote a digest of that.
        return False
