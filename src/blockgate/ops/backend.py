"""Which implementation computes: chosen by name, checked early, and never changed in silence."""

from __future__ import annotations

import logging

from blockgate.errors import BackendError, invalid
from blockgate.ops import native

__all__ = ["BACKENDS", "check_backend", "check_device", "describe_auto"]

BACKENDS = ("auto", "reference", "cpu", "triton")

_logger = logging.getLogger("blockgate")
_announced = False


def check_backend(backend: str) -> str:
    """Returns `backend` if it is known and can run here; a named one that can't run raises."""
    if backend not in BACKENDS:
        raise invalid("backend", expected=f"one of {BACKENDS}", got=backend, remedy="Use 'auto' unless you compare.")
    if backend == "triton":
        raise BackendError("backend 'triton': expected GPU kernels, got none: not built yet. Use backend='auto'.")
    if backend == "cpu" and (reason := native.unavailable_reason()):
        raise BackendError(f"backend 'cpu': expected native kernels, got none: {reason}. Or use backend='auto'.")
    if backend == "auto":
        _announce_auto()
    return backend


def check_device(backend: str, device_type: str) -> None:
    """Raises when a backend is named that has no kernels for tensors on `device_type`."""
    if backend == "cpu" and device_type not in {"cpu", "meta"}:
        raise BackendError(f"backend 'cpu': expected tensors on the CPU, got {device_type!r}. Use backend='auto'.")


def describe_auto() -> str:
    """What backend="auto" runs on the CPU, and why."""
    if reason := native.unavailable_reason():
        return f"reference ({reason})"
    return f"cpu ({native.isa()} kernels)"


def _announce_auto() -> None:
    """Logs once what "auto" means here; a warning where it means the slow reference."""
    global _announced
    if _announced:
        return
    level = logging.WARNING if native.unavailable_reason() else logging.INFO
    _logger.log(level, "backend 'auto' runs: %s; tensors on other devices: reference", describe_auto())
    _announced = True
