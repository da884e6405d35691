"""Which implementation computes: chosen by name, checked early, and never changed in silence."""

from __future__ import annotations

import logging

from blockgate.errors import BackendError, invalid
from blockgate.ops import gpu, native

__all__ = ["BACKENDS", "check_backend", "check_device", "describe_auto", "describe_gpu"]

BACKENDS = ("auto", "reference", "cpu", "triton")

_logger = logging.getLogger("blockgate")
_announced = False


def check_backend(backend: str) -> str:
    """Returns `backend` if it is known and can run here; a named one that can't run raises."""
    if backend not in BACKENDS:
        raise invalid("backend", expected=f"one of {BACKENDS}", got=backend, remedy="Use 'auto' unless you compare.")
    if backend == "triton" and (reason := gpu.unavailable_reason()):
        raise BackendError(f"backend 'triton': expected GPU kernels, got none: {reason}. Or use backend='auto'.")
    if backend == "cpu" and (reason := native.unavailable_reason()):
        raise BackendError(f"backend 'cpu': expected native kernels, got none: {reason}. Or use backend='auto'.")
    if backend == "auto":
        _announce_auto()
    return backend


def check_device(backend: str, device_type: str) -> None:
    """Raises when a backend is named that has no kernels for tensors on `device_type`."""
    if backend == "cpu" and device_type not in {"cpu", "meta"}:
        raise BackendError(f"backend 'cpu': expected tensors on the CPU, got {device_type!r}. Use backend='auto'.")
    if backend == "triton" and device_type != "meta" and (reason := gpu.device_refusal(device_type)):
        raise BackendError(f"backend 'triton': expected tensors on a GPU, got none: {reason}. Or use backend='auto'.")


def describe_auto() -> str:
    """What backend="auto" runs on the CPU, and why."""
    if reason := native.unavailable_reason():
        return f"reference ({reason})"
    return f"cpu ({native.isa()} kernels)"


def describe_gpu() -> str:
    """What backend="auto" runs on a GPU, and why."""
    if reason := gpu.unavailable_reason():
        return f"reference ({reason})"
    return "triton"


def _announce_auto() -> None:
    """Logs once what "auto" means here; a warning where it means the slow reference."""
    global _announced
    if _announced:
        return
    level = logging.WARNING if native.unavailable_reason() else logging.INFO
    _logger.log(level, "backend 'auto' runs: %s; tensors on a GPU: %s", describe_auto(), describe_gpu())
    _announced = True
