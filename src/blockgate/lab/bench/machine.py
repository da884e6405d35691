"""What this machine can do at best, measured in the same run as the layers: the roofs that results stand under."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch

from blockgate._version import __version__
from blockgate.lab.bench.timing import cache_bytes, seconds_of
from blockgate.ops import native

__all__ = ["describe", "peak_flops", "read_bandwidth"]


def describe() -> dict[str, str | int]:
    """Hardware and versions, for the head of every result."""
    return {
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "instruction set": native.isa() or "none (reference)",
        "last-level cache": f"{cache_bytes() >> 20} MiB",
        "blockgate": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


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


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    names = {key.strip(): value.strip() for key, value in facts.items()}
    return f"{names.get('model name', platform.machine())} (family {names.get('cpu family', '?')})"


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
