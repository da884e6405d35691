"""Ours against the fastest of several rivals, timed side by side: one table for each kind of work."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from blockgate.inspect.timing import Timing, evict_cache, interleave, seconds_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Arm", "Comparison", "ComparisonResult", "comparison_markdown", "run_comparison"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One way to do the work.

    Args:
        name: what it is, short.
        call: does the work once.
        floor: the speed-up over the fastest rival that we promise; None where nothing is promised.
        rival: whether it is one of those that the others are compared with.
        read: bytes that it must read; None where nobody counted.
    """

    name: str
    call: Callable[[], Any]
    floor: float | None = None
    rival: bool = False
    read: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A kind of work, and the arms that do it.

    Args:
        work: what it is, for titles.
        arms: the ways to do it.
        left_out: other ways, and why they aren't measured.
        training: whether calls need gradients.
        remarks: what the reader of the table must know.
    """

    work: str
    arms: list[Arm]
    left_out: dict[str, str] = field(default_factory=dict)
    training: bool = False
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonResult:
    """A comparison with its times, hot and with an evicted cache.

    `read_bandwidth` is that of a plain read with an evicted cache, in bytes per second, measured in the same run; None
    where arms don't say what they read.
    """

    comparison: Comparison
    timings: dict[str, Timing]
    cold_timings: dict[str, Timing]
    read_bandwidth: float | None = None

    @property
    def best_rival(self) -> str:
        """The fastest of those we compare with."""
        return self._best(self.timings)

    def speedup(self, name: str) -> float:
        """How many times faster than the fastest rival, by medians."""
        return self.timings[self.best_rival].median / self.timings[name].median

    def cold_speedup(self, name: str) -> float | None:
        """The same with an evicted cache, against the rival that is fastest then."""
        if not self.cold_timings:
            return None
        return self.cold_timings[self._best(self.cold_timings)].median / self.cold_timings[name].median

    def bandwidth_share(self, arm: Arm) -> float | None:
        """What an arm reads per second with an evicted cache, as a share of a plain read."""
        if self.read_bandwidth is None or arm.read is None:
            return None
        return arm.read / self.cold_timings[arm.name].median / self.read_bandwidth

    @property
    def met(self) -> bool:
        """Whether every floor is reached with a warm cache."""
        return all(c.floor is None or self.speedup(c.name) >= c.floor for c in self.comparison.arms)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "work": self.comparison.work,
            "best_rival": self.best_rival,
            "met": self.met,
            "left_out": self.comparison.left_out,
            "remarks": self.comparison.remarks,
            "read_bandwidth": self.read_bandwidth,
            "arms": [
                {
                    "name": c.name,
                    "rival": c.rival,
                    "floor": c.floor,
                    "speedup": self.speedup(c.name),
                    "evicted_cache_speedup": self.cold_speedup(c.name),
                    "evicted_cache_median": self.cold_timings[c.name].median if self.cold_timings else None,
                    "read_bytes": c.read,
                    "share_of_read_bandwidth": self.bandwidth_share(c),
                    **asdict(self.timings[c.name]),
                }
                for c in self.comparison.arms
            ],
        }

    def _best(self, timings: dict[str, Timing]) -> str:
        rivals = [c.name for c in self.comparison.arms if c.rival]
        return min(rivals, key=lambda name: timings[name].median)


def run_comparison(
    comparison: Comparison, *, seconds: float, cold: bool = False, progress: Callable[[], None] = lambda: None
) -> ComparisonResult:
    """Times all arms in turn; `cold` times them with an evicted cache too."""
    calls = {arm.name: arm.call for arm in comparison.arms}
    counted = cold and any(arm.read is not None for arm in comparison.arms)
    # Around all of them: for one token, switching gradients off in every call would be part of its time.
    with torch.set_grad_enabled(comparison.training):
        return ComparisonResult(
            comparison=comparison,
            timings=interleave(calls, seconds=seconds, progress=progress),
            cold_timings=interleave(calls, seconds=seconds, cold=True, progress=progress) if cold else {},
            read_bandwidth=cold_read_bandwidth() if counted else None,
        )


def cold_read_bandwidth(*, size: int = 48 << 20, repeats: int = 15) -> float:
    """Bytes per second of a plain read of `size` bytes with an evicted cache, the median of several."""
    data = torch.ones(size // 4)

    def once() -> float:
        evict_cache()
        return seconds_of(data.sum)

    return size / statistics.median(once() for _ in range(repeats))


def comparison_markdown(result: ComparisonResult) -> str:
    """One comparison as a table; ratios are to the fastest rival, which is named."""
    reads = result.read_bandwidth is not None
    lines = [
        f"\n## {result.comparison.work}\n",
        "| arm | median ms | p10 | p90 | speed-up | floor | evicted cache |" + " reads MB | of bandwidth |" * reads,
        "|---|--:|--:|--:|--:|--:|--:|" + "--:|--:|" * reads,
    ]
    for arm in result.comparison.arms:
        t = result.timings[arm.name]
        cold = result.cold_speedup(arm.name)
        floor = "" if arm.floor is None else f"{arm.floor:.3g}x"
        lines.append(
            f"| {arm.name} | {t.median * 1e3:.3f} | {t.p10 * 1e3:.3f} | {t.p90 * 1e3:.3f} | "
            f"{_reached(result.speedup(arm.name), arm.floor)} | "
            f"{floor} | {'' if cold is None else f'{cold:.2f}x'} |" + _reading(result, arm) * reads
        )
    lines.append(f"\nSpeed-ups are over *{result.best_rival}*.")
    if result.read_bandwidth is not None:
        lines.append(
            f"Shares of bandwidth: of a plain read, {result.read_bandwidth / 1e9:.1f} GB/s, both with an evicted cache."
        )
    lines += result.comparison.remarks
    lines += [f"Not measured: {name} ({why})." for name, why in result.comparison.left_out.items()]
    return "\n".join(lines) + "\n"


def _reading(result: ComparisonResult, arm: Arm) -> str:
    share = result.bandwidth_share(arm)
    return f" {'' if arm.read is None else f'{arm.read / 1e6:.1f}'} | {'' if share is None else f'{share:.0%}'} |"


def _reached(speedup: float, floor: float | None) -> str:
    missed = floor is not None and speedup < floor
    return f"**{speedup:.2f}x**" if missed else f"{speedup:.2f}x"
