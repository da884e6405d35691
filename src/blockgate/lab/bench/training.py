"""Forward and backward of one layer against nn.Linear: time side by side, and peak memory in a process of its own."""

from __future__ import annotations

import gc
import multiprocessing
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from blockgate.inspect.timing import Timing, interleave
from blockgate.lab.bench.linear import DENSE, LinearCase, dynamic_layer

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TrainingResult", "run_training"]

STEPS_FOR_MEMORY = 3


@dataclass(kw_only=True, slots=True)
class TrainingResult:
    """Times of a training step (forward and backward) and peak memory in bytes, by arm."""

    case: LinearCase
    timings: dict[str, Timing]
    memory: dict[str, int]

    def speedup(self, name: str) -> float:
        """How many times faster than dense torch, by medians."""
        return self.timings[DENSE].median / self.timings[name].median

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        case = asdict(self.case) | {"dtypes": ["fp32"], "title": f"training, {self.case.title}"}
        arms = [
            {"name": name, "speedup": self.speedup(name), "peak_bytes": self.memory.get(name), **asdict(timing)}
            for name, timing in self.timings.items()
        ]
        return {"case": case, "arms": arms}


def arm_name(sparsity: float) -> str:
    """How an arm of this sparsity is called."""
    return f"blockgate fp32 {sparsity:.0%}"


def run_training(
    case: LinearCase, *, seconds: float, memory: bool = True, progress: Callable[[], None] = lambda: None
) -> TrainingResult:
    """Times forward and backward of every arm side by side, and measures what each needs at its peak."""
    steps = {DENSE: _training_step(case, None)} | {arm_name(s): _training_step(case, s) for s in case.sparsities}
    clock = time.thread_time if case.cpu_time else time.perf_counter
    timings = interleave(steps, seconds=seconds, clock=clock, progress=progress)
    peaks = {}
    if memory:
        for name, sparsity in [(DENSE, None), *((arm_name(s), s) for s in case.sparsities)]:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                peaks[name] = pool.apply(_peak_bytes, (case, sparsity))
    return TrainingResult(case=case, timings=timings, memory=peaks)


def _training_step(case: LinearCase, sparsity: float | None) -> Callable[[], None]:
    """A step of the dense layer (None) or of ours: gradients of input, weight, bias and gate."""
    torch.manual_seed(0)
    layer: nn.Module = (
        nn.Linear(case.in_features, case.out_features) if sparsity is None else dynamic_layer(case, sparsity).train()
    )
    x = torch.randn(case.batch, case.in_features, requires_grad=True)
    grad = torch.randn(case.batch, case.out_features)

    def step() -> None:
        for leaf in (x, *layer.parameters()):
            leaf.grad = None
        layer(x).backward(grad)

    return step


def _peak_bytes(case: LinearCase, sparsity: float | None) -> int:
    """Memory that building the layer and training it adds to a process at its peak."""
    small = LinearCase(out_features=256, in_features=256, batch=8, block=64, key=64)
    _training_step(small, sparsity)()  # loads libraries and starts threads
    gc.collect()
    before = _memory("VmRSS")
    step = _training_step(case, sparsity)
    for _ in range(STEPS_FOR_MEMORY):
        step()
    # Not getrusage: its peak includes that of the process this one was started from.
    return _memory("VmHWM") - before


def _memory(field: str) -> int:
    """A size of this process in bytes, as Linux tells it: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) * 1024
