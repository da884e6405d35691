"""The speed we promise: ratios to nn.Linear in float32, gate and selection inside, each with its floor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from blockgate.inspect.timing import using_threads
from blockgate.lab.bench.linear import DENSE, LinearCase, run_linear
from blockgate.lab.bench.training import arm_name, run_training

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TARGETS", "Target", "TargetResult", "run_target"]

SPARSITIES = (0.5, 0.75, 0.9)
FP32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One line of the table: a case, the type of the packed weights, and the least speed-up at each sparsity."""

    work: str
    out_features: int = 6144
    in_features: int = 1536
    batch: int = 1
    block: int = 128
    key: int = 128
    dtype: torch.dtype = FP32
    threads: int | None = None
    training: bool = False
    sparsities: tuple[float, ...] = SPARSITIES
    floors: tuple[float, ...]

    def case(self, *, cold: bool = False) -> LinearCase:
        """The measurement behind this line."""
        return LinearCase(
            out_features=self.out_features,
            in_features=self.in_features,
            batch=self.batch,
            block=self.block,
            key=self.key,
            sparsities=self.sparsities,
            dtypes=(self.dtype,),
            static=False,
            cold=cold,
        )


@dataclass(kw_only=True, slots=True)
class TargetResult:
    """What a target reached; `packed_dense` is the speed-up of the dense layer packed alike."""

    target: Target
    speedups: list[float]
    cold_speedups: list[float] | None
    dense_seconds: float
    packed_dense: float | None = None
    memory_ratios: list[float] | None = None

    @property
    def met(self) -> bool:
        """Whether every floor is reached with a warm cache."""
        return all(s >= floor for s, floor in zip(self.speedups, self.target.floors, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "work": self.target.work,
            "sparsities": list(self.target.sparsities),
            "floors": list(self.target.floors),
            "speedups": self.speedups,
            "evicted_cache_speedups": self.cold_speedups,
            "dense_seconds": self.dense_seconds,
            "packed_dense_speedup": self.packed_dense,
            "memory_ratios": self.memory_ratios,
            "met": self.met,
        }


def run_target(target: Target, *, seconds: float, progress: Callable[[], None] = lambda: None) -> TargetResult:
    """Measures one line; inference also with an evicted cache."""
    with using_threads(target.threads):
        if target.training:
            return _run_training(target, seconds, progress)
        hot = run_linear(target.case(), seconds=seconds, progress=progress)
        cold = run_linear(target.case(cold=True), seconds=seconds, progress=progress) if target.batch == 1 else None
    _, packed_dense, *ours = hot.arms
    return TargetResult(
        target=target,
        speedups=[hot.speedup(arm) for arm in ours],
        cold_speedups=None if cold is None else [cold.speedup(arm) for arm in cold.arms[2:]],
        dense_seconds=hot.timings[DENSE].median,
        packed_dense=hot.speedup(packed_dense),
    )


def _run_training(target: Target, seconds: float, progress: Callable[[], None]) -> TargetResult:
    result = run_training(target.case(), seconds=seconds, progress=progress)
    names = [arm_name(s) for s in target.sparsities]
    return TargetResult(
        target=target,
        speedups=[result.speedup(name) for name in names],
        cold_speedups=None,
        dense_seconds=result.timings[DENSE].median,
        memory_ratios=[result.memory[name] / result.memory[DENSE] for name in names],
    )


TARGETS = (
    Target(work="batch 1, 6144x1536, fp32", floors=(1.9, 3.4, 7.5)),
    Target(work="the same, bf16 packed", dtype=BF16, floors=(3.6, 6.5, 13)),
    Target(work="the same, int8 packed", dtype=INT8, floors=(6, 10, 16)),
    Target(work="the same, fp32, 1 thread", threads=1, floors=(1.8, 3.3, 7)),
    Target(work="batch 1, 1024x1024, fp32", out_features=1024, in_features=1024, floors=(1.9, 3, 5)),
    Target(work="block 64, key 64, batch 1, 6144x1536, fp32", block=64, key=64, floors=(1.7, 3.0, 6)),
    Target(work="block 32, key 32, batch 1, 6144x1536, fp32", block=32, key=32, floors=(1.4, 2.3, 3.5)),
    Target(work="batch 4, 6144x1536, fp32", batch=4, floors=(1.6, 2.2, 3.2)),
    Target(work="batch 16, 6144x1536, fp32", batch=16, floors=(1.6, 2.2, 3.2)),
    Target(work="batch 128, 6144x1536, fp32", batch=128, floors=(1.6, 2.7, 4)),
    Target(work="batch 1024, 6144x1536, fp32", batch=1024, floors=(1.6, 2.7, 4)),
    Target(work="forward + backward, batch 512, 6144x1536", batch=512, training=True, floors=(1.4, 2.4, 4.5)),
    Target(
        work="forward + backward, block 16, key 32, batch 512, 1024x256",
        out_features=1024,
        in_features=256,
        block=16,
        key=32,
        batch=512,
        training=True,
        floors=(1, 1.6, 2.5),
    ),
    Target(work="sparsity 0, batch 1, 6144x1536, fp32", sparsities=(0.0,), floors=(1 / 1.15,)),
    Target(
        work="batch 1, 256x256, block 64, key 64, fp32",
        out_features=256,
        in_features=256,
        block=64,
        key=64,
        sparsities=(0.75, 0.9),
        floors=(1, 1),
    ),
)
