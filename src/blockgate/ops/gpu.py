"""Where the Triton kernels can run, and what they leave to the reference. Imports Triton only when a kernel is needed.

With `TRITON_INTERPRET=1` in the environment of the process, Triton's interpreter runs the kernels on CPU tensors: slow,
and the way to test them without a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "DEVICES",
    "FORMATS",
    "LARGEST_GROUP",
    "NotServedError",
    "device_refusal",
    "interpreting",
    "launch",
    "log_once",
    "runs_kernels",
    "unavailable_reason",
]

# Kinds of devices that torch names and Triton compiles for; "cuda" is AMD's too.
DEVICES = ("cuda", "xpu")

# The packed formats that kernels read, and the most scores that one selects from at once.
FORMATS = ("float32", "bfloat16", "float16", "int8", "int4")
LARGEST_GROUP = 16384

# Found once: looked for in a call, torch.compile would warn that it traces a search for files.
_unavailable = None
if importlib.util.find_spec("triton") is None:
    _unavailable = "Triton is not installed; pip install 'blockgate[gpu]'"

_logger = logging.getLogger("blockgate")
_logged: set[str] = set()


class NotServedError(Exception):
    """A kernel's answer to arguments that it doesn't compute: the reason, for the caller to log or to raise."""


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def unavailable_reason() -> str | None:
    """Why there are no Triton kernels in this process; None when there are."""
    return _unavailable


def device_refusal(device_type: str) -> str | None:
    """Why the kernels can't run on tensors of this kind of device; None when they can."""
    if (reason := unavailable_reason()) is not None:
        return reason
    if device_type in DEVICES or (device_type == "cpu" and interpreting()):
        return None
    if device_type == "cpu":
        return "tensors are on the CPU; move them to a GPU, or set TRITON_INTERPRET=1 to run kernels in the interpreter"
    return f"Triton has no kernels for tensors on {device_type!r}"


def runs_kernels(backend: str, device_type: str) -> bool:
    """Whether ops on such tensors run Triton kernels, which take half precision as it is and sum in float32."""
    ours = backend == "triton" or (backend == "auto" and device_type in DEVICES)
    return ours and device_refusal(device_type) is None


def launch(module: str, name: str, args: tuple[Any, ...]) -> Any:
    """Calls a function of a module that imports Triton, on the device of its first argument."""
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    device = args[0].device
    # Triton launches on the current device, whichever that of the tensors is.
    current = nullcontext() if device.type == "cpu" else torch.get_device_module(device.type).device(device)
    # Autocast would reach through the op into the products of torch beside our kernels.
    with current, torch.autocast(device.type, enabled=False):
        return function(*args)


def log_once(message: str) -> None:
    """A warning, the first time that it is said."""
    if message not in _logged:
        _logged.add(message)
        _logger.warning(message)
