"""Time per token of trained models, each by the fastest ways there are for it, side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from blockgate.inspect.timing import in_turn, interleave, using_threads
from blockgate.lab.bench import machine
from blockgate.lab.bench.checks import PACKED_TYPES
from blockgate.lab.bench.decoding import require_same, single_steps
from blockgate.lab.reproduce.arms import Arm
from blockgate.lab.training import Trained
from blockgate.lab.training.tasks import make_task

__all__ = ["ENGINES", "time_models"]

# What tables call the ways to run a model. Packed: open blocks only; pruned single weights count as dense ones there.
ENGINES = ("torch", "float32", "bfloat16", "int8", "CSR")
PACKED = {str(dtype).removeprefix("torch."): dtype for dtype in PACKED_TYPES.values()}

INPUTS = 64


@torch.no_grad()
def time_models(models: dict[Arm, Trained], *, threads: int, seconds: float) -> dict[str, Any]:
    """Seconds per token (or image) at batch 1, by arm and engine, of the whole model and of its layers only.

    Models with rounded weights are also evaluated on the test data.

    Args:
        models: the trained models.
        threads: CPU threads.
        seconds: time to spend on each call.
    """
    calls: dict[str, Callable[[], Any]] = {}
    quality: dict[str, dict[str, float]] = {}
    with using_threads(threads):
        for arm, trained in models.items():
            task = make_task(trained.run, vocabulary=trained.vocabulary)
            inputs = task.single_inputs("test", INPUTS)
            for engine, model in _engines(arm, trained.model).items():
                if engine in {"bfloat16", "int8"}:
                    sums = task.evaluate(model, "test", torch.device("cpu"))
                    quality.setdefault(arm.name, {})[engine] = task.metrics(sums)[task.score]
                exact = engine in {"float32", "CSR"}
                require_same(f"{arm.name} by {engine}", model, trained.model, inputs, exact=exact)
                for part, step in single_steps(model).items():
                    calls[f"{arm.name}/{engine}/{part}"] = in_turn(inputs, step)
        times = interleave(calls, seconds=seconds)
        described = machine.describe()
    result: dict[str, Any] = {"machine": described, "seconds": {}, "quality": quality}
    for name, timing in times.items():
        arm_name, engine, part = name.split("/")
        facts = {"median": timing.median, "p90": timing.p90, "calls": timing.calls}
        result["seconds"].setdefault(arm_name, {}).setdefault(engine, {})[part] = facts
    return result


def _engines(arm: Arm, model: nn.Module) -> dict[str, nn.Module]:
    """The model as torch runs it, packed to each type, and in the further ways that its kind has."""
    packed = {name: arm.facts.pack(model, dtype) for name, dtype in PACKED.items()}
    return {"torch": model, **packed, **{name: make(model) for name, make in arm.facts.other_ways.items()}}
