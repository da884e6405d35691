"""How we time: arms interleaved in one run, medians and tails, hot and with an evicted cache."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["ROUNDS", "Timing", "cache_bytes", "evict_cache", "interleave"]

# Calls of one arm in a row: the first few bring its data back into the cache and are not counted. Slow arms, whose data
# no cache holds, have one.
WARM_CALLS = 3
# How often each arm has its turn.
ROUNDS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Times of one arm, in seconds."""

    median: float
    p10: float
    p90: float
    p99: float
    calls: int

    @classmethod
    def of(cls, times: list[float]) -> Timing:
        """Summary of single times."""
        ordered = sorted(times)

        def quantile(share: float) -> float:
            return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

        return cls(
            median=statistics.median(ordered),
            p10=quantile(0.1),
            p90=quantile(0.9),
            p99=quantile(0.99),
            calls=len(ordered),
        )


def interleave(
    arms: dict[str, Callable[[], Any]],
    *,
    seconds: float,
    cold: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Times all arms in turn, round after round, so that what the machine does meanwhile hits them alike.

    Args:
        arms: name to a call.
        seconds: time to spend on each arm, about. One that takes longer for a single call joins in every fourth round.
        cold: evict the cache before every timed call; otherwise an arm's data is warm.
        progress: called after each round.
    """
    for call in arms.values():
        call()
    once = {name: _seconds(call) for name, call in arms.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(ROUNDS):
        for name, call in arms.items():
            if once[name] <= seconds or turn % 4 == 0:
                times[name] += _timed(call, _calls_per_round(once[name], seconds / ROUNDS), cold)
        progress()
    return {name: Timing.of(values) for name, values in times.items()}


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _calls_per_round(once: float, seconds: float) -> int:
    return max(1, min(2000, int(seconds / max(once, 1e-7))))


def _timed(call: Callable[[], Any], calls: int, cold: bool) -> Iterator[float]:
    if not cold:
        for _ in range(min(WARM_CALLS, calls)):
            call()
    for _ in range(calls if not cold else min(calls, 10)):
        if cold:
            evict_cache()
        begin = time.perf_counter()
        call()
        yield time.perf_counter() - begin


def cache_bytes() -> int:
    """Size of the largest cache of this machine; 32 MiB where it can't be read."""
    sizes = [_parse_size(f.read_text()) for f in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=32 << 20)


def _parse_size(text: str) -> int:
    text = text.strip()
    unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
    return int(text.rstrip("KM")) * unit


_eviction: list[torch.Tensor] = []


def evict_cache() -> None:
    """Reads twice as many bytes as the largest cache holds."""
    if not _eviction:
        _eviction.append(torch.ones(2 * cache_bytes() // 4))
    _eviction[0].sum()
