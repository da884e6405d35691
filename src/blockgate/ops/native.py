"""Loads the compiled kernels, if they are there, and remembers why not."""

from __future__ import annotations

import hashlib
import importlib
import sys
from functools import cache
from pathlib import Path

import torch

from blockgate.errors import BackendError

__all__ = ["build_digest", "isa", "unavailable_reason"]

_MODULE = "blockgate._C"


def _load() -> str | None:
    """Imports the extension, which registers its kernels with torch; returns why that failed, or None."""
    try:
        importlib.import_module(_MODULE)
    except ModuleNotFoundError:
        return "the native kernels were not built; install from source with a C++ compiler and --no-build-isolation"
    except ImportError as error:
        return f"the native kernels could not be loaded: {error}"
    return None


_reason = _load()


def unavailable_reason() -> str | None:
    """Why the native kernels can't run; None when they can."""
    return _reason


@cache
def build_digest() -> str:
    """A short digest of the file with the kernels, which tells one build from another; "" without kernels."""
    file = getattr(sys.modules.get(_MODULE), "__file__", None)
    return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]


def isa() -> str | None:
    """The instruction set in use: "avx512vnni", "avx512", "avx2" or "baseline"; None without native kernels."""
    if _reason is not None:
        return None
    try:
        return str(torch.ops.blockgate.isa())
    except RuntimeError as error:
        # Without the place in the C++ source that torch puts before the message.
        message = str(error)
        raise BackendError(message[max(0, message.find("BLOCKGATE_ISA")) :]) from None
