"""How everything here is timed: calls interleaved in one run, medians and tails, hot and with an evicted cache."""

from __future__ import annotations

import copy
import itertools
import math
import platform
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

__all__ = [
    "ROUNDS",
    "Timing",
    "cache_bytes",
    "carry_on",
    "copies_past_cache",
    "cpu_name",
    "evict_cache",
    "in_turn",
    "interleave",
    "seconds_of",
    "using_threads",
]

# Calls of one arm in a row: the first few bring its data back into the cache and are not counted. Slow arms, whose data
# no cache holds, have one.
WARM_CALLS = 3
# Copies of a layer that are called in turn, so that no cache holds the weights of the next one.
MOST_COPIES = 96
# How often each arm has its turn.
ROUNDS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Times of one arm, in seconds; `rounds` has the median of each of its turns."""

    median: float
    p10: float
    p90: float
    p99: float
    calls: int
    rounds: tuple[float, ...] = ()

    @property
    def spread(self) -> float:
        """How many times longer the slow calls take than the fast ones: p90 / p10."""
        return self.p90 / self.p10

    @classmethod
    def of(cls, rounds: list[list[float]]) -> Timing:
        """Summary of single times, given round by round."""
        ordered = sorted(itertools.chain.from_iterable(rounds))

        def quantile(share: float) -> float:
            return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

        return cls(
            median=statistics.median(ordered),
            p10=quantile(0.1),
            p90=quantile(0.9),
            p99=quantile(0.99),
            calls=len(ordered),
            rounds=tuple(statistics.median(times) for times in rounds),
        )


def interleave(
    arms: dict[str, Callable[[], Any]],
    *,
    seconds: float,
    cold: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Times all arms in turn, round after round, so that what the machine does meanwhile hits them alike.

    Args:
        arms: name to a call.
        seconds: time to spend on each arm, about. One that takes longer for a single call joins in every fourth round.
        cold: evict the cache before every timed call; otherwise an arm's data is warm.
        clock: the time now, in seconds; `time.thread_time` counts what this thread computes, whatever else runs.
        progress: called after each round.
    """
    for call in arms.values():
        call()
    once = {name: seconds_of(call) for name, call in arms.items()}
    rounds: dict[str, list[list[float]]] = {name: [] for name in arms}
    for turn in range(ROUNDS):
        for name, call in arms.items():
            if once[name] <= seconds or turn % 4 == 0:
                rounds[name].append(list(_timed(call, _calls_per_round(once[name], seconds / ROUNDS), cold, clock)))
        progress()
    return {name: Timing.of(times) for name, times in rounds.items()}


def in_turn(inputs: Iterable[Any], step: Callable[[Any], Any]) -> Callable[[], Any]:
    """A call that gives `step` the next input each time: the same one again would find its blocks in the cache."""
    turn = itertools.cycle(inputs)
    return lambda: step(next(turn))


def copies_past_cache(layer: nn.Module) -> list[nn.Module]:
    """The layer and copies of it, so many that together they are twice as large as the cache, but at most MOST_COPIES.

    Called in turn, none finds its weights in the cache.
    """
    size = sum(t.nbytes for t in itertools.chain(layer.parameters(), layer.buffers()))
    count = max(1, min(MOST_COPIES, math.ceil(2 * cache_bytes() / max(1, size))))
    return [layer, *(copy.deepcopy(layer) for _ in range(count - 1))]


def carry_on(step: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[[Any], Any]:
    """A call that gives `step` an input and the state that the call before returned, None at first."""
    carried = None

    def call(x: Any) -> Any:
        nonlocal carried
        output, carried = step(x, carried)
        return output

    return call


@contextmanager
def using_threads(count: int | None) -> Iterator[None]:
    """Lets torch use so many threads for a while; None leaves the number as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seconds_of(call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """How long one call takes."""
    begin = clock()
    call()
    return clock() - begin


def _calls_per_round(once: float, seconds: float) -> int:
    return max(1, min(2000, int(seconds / max(once, 1e-7))))


def _timed(call: Callable[[], Any], calls: int, cold: bool, clock: Callable[[], float]) -> Iterator[float]:
    if not cold:
        for _ in range(min(WARM_CALLS, calls)):
            call()
    for _ in range(calls if not cold else min(calls, 10)):
        if cold:
            evict_cache()
        yield seconds_of(call, clock)


def cache_bytes() -> int:
    """Size of the largest cache of this machine; 32 MiB where it can't be read."""
    sizes = [_parse_size(f.read_text()) for f in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=32 << 20)


def cpu_name() -> str:
    """Model and family of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    names = {key.strip(): value.strip() for key, value in facts.items()}
    return f"{names.get('model name', platform.machine())} (family {names.get('cpu family', '?')})"


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
