"""What this machine can do at best, measured in the same run as the layers: the roofs that results stand under."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path

import torch

from blockgate._version import __version__
from blockgate.inspect.timing import cache_bytes, cpu_name, seconds_of
from blockgate.ops import native

__all__ = ["Others", "describe", "peak_flops", "read_bandwidth"]


def describe() -> dict[str, str | int]:
    """Hardware and versions, for the head of every result."""
    return {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "instruction set": native.isa() or "none (reference)",
        "last-level cache": f"{cache_bytes() >> 20} MiB",
        "blockgate": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


class Others:
    """How much of the machine other processes use from its making on: whether times were taken on a quiet machine."""

    def __init__(self) -> None:
        self._begin = time.monotonic(), _others_seconds()

    @property
    def cores(self) -> float | None:
        """How many cores the others have used since then, on average; None where it can't be read."""
        begin, before = self._begin
        after = _others_seconds()
        if before is None or after is None:
            return None
        return max(0.0, after - before) / max(1e-3, time.monotonic() - begin)

    def __str__(self) -> str:
        cores = self.cores
        return "unknown" if cores is None else f"{cores:.2f} of {os.cpu_count()} cores"


def _others_seconds() -> float | None:
    """Processor time that everything but this process and its ended children has used; None where it can't be read."""
    try:
        user, nice, system, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    except (OSError, ValueError):
        return None
    own = os.times()
    ours = own.user + own.system + own.children_user + own.children_system
    return (user + nice + system) / os.sysconf("SC_CLK_TCK") - ours


def read_bandwidth(size: int, *, repeats: int = 15) -> float:
    """Bytes per second of a plain read of `size` bytes, best of `repeats`: what batch 1 can reach for that many."""
    data = torch.ones(max(1, size // 4))
    best = min(seconds_of(lambda: data.sum()) for _ in range(repeats))
    return data.numel() * 4 / best


def peak_flops(*, size: int = 2048, repeats: int = 5) -> float:
    """Multiply-adds per second, times two, of torch's dense float32 product at a friendly size."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    best = min(seconds_of(lambda: a @ b) for _ in range(repeats))
    return 2 * size**3 / best


def _commit() -> str:
    """The commit this source tree stands at, with a mark if it was changed since; unknown outside a checkout."""
    here = Path(__file__).parent
    if not (here.parents[3] / "setup.py").exists():  # installed, perhaps inside somebody else's checkout
        return "unknown"
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--", "src", "setup.py"],
            cwd=here.parents[3],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+changes" if changed.stdout.strip() else "")
