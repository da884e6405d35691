"""Time per token of trained models, each by the fastest ways there are for it, side by side."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from blockgate.inspect.timing import carry_on, in_turn, interleave, using_threads
from blockgate.lab.bench import machine
from blockgate.lab.bench.decoding import require_likeliest, require_same, single_steps
from blockgate.lab.bench.engines import greedy_step
from blockgate.lab.models import LanguageModel
from blockgate.lab.models.softmax import FullSoftmax
from blockgate.lab.reproduce.arms import Arm
from blockgate.lab.training import Trained
from blockgate.lab.training.tasks import make_task

__all__ = ["BATCHES", "ENGINES", "PACKED", "SCREENED", "part_name", "time_models"]

# Formats of packed weights. Only open blocks are computed; pruned single weights count as dense ones there.
PACKED = ("float32", "bfloat16", "int8", "int4")
# Those whose rounded weights change what a model says.
ROUNDED = ("bfloat16", "int8", "int4")
# What is added to the name of a format where the output layer finds its likeliest word by screening.
SCREENED = ", screened"
# What tables call the ways to run a model.
ENGINES = ("torch", *PACKED, "CSR", "int8" + SCREENED, "int4" + SCREENED)

# So many texts are read side by side, or images looked at.
BATCHES = (1, 16)
INPUTS = 64
DECODER = "softmax.decoder"


def part_name(part: str, batch: int) -> str:
    """The name of a time in files: "model", "layers" or "likeliest" for one text, such as "model-16" for more."""
    return part if batch == 1 else f"{part}-{batch}"


@torch.no_grad()
def time_models(models: dict[Arm, Trained], *, threads: int, seconds: float) -> dict[str, Any]:
    """Seconds per token (or image), by arm and engine: of the whole model for each of BATCHES, of its layers for one.

    Language models that score every word have one more: the likeliest next word, with a screened output layer too.
    Models with rounded weights are also evaluated on the test data.

    Args:
        models: the trained models.
        threads: CPU threads.
        seconds: time to spend on each call.
    """
    calls: dict[tuple[str, str, str], tuple[int, Callable[[], Any]]] = {}
    quality: dict[str, dict[str, float]] = {}
    with using_threads(threads):
        for arm, trained in models.items():
            task = make_task(trained.run, vocabulary=trained.vocabulary)
            inputs = {rows: _batches(task.single_inputs("test", rows * INPUTS), rows) for rows in BATCHES}
            for engine, model in _engines(arm, trained.model).items():
                name = f"{arm.name} by {engine}"
                if engine.removesuffix(SCREENED) in ROUNDED:
                    sums = task.evaluate(model, "test", torch.device("cpu"))
                    quality.setdefault(arm.name, {})[engine] = task.metrics(sums)[task.score]
                for rows, xs in inputs.items():
                    if engine.endswith(SCREENED):
                        require_likeliest(name, model, trained.model, xs)
                    else:
                        require_same(name, model, trained.model, xs, exact=engine in {"float32", "CSR"})
                    for part, step in _steps(engine, model, rows).items():
                        calls[arm.name, engine, part_name(part, rows)] = rows, in_turn(xs, step)
        times = interleave({"/".join(name): call for name, (_, call) in calls.items()}, seconds=seconds)
        described = machine.describe()
    result: dict[str, Any] = {"machine": described, "seconds": {}, "quality": quality}
    for (arm_name, engine, part), (rows, _) in calls.items():
        timing = times[f"{arm_name}/{engine}/{part}"]
        facts = {"median": timing.median / rows, "p90": timing.p90 / rows, "calls": timing.calls}
        result["seconds"].setdefault(arm_name, {}).setdefault(engine, {})[part] = facts
    return result


def _batches(inputs: list[Tensor], rows: int) -> list[Tensor]:
    """Inputs of several rows, from single ones: texts (1, 1) side by side, each a part of the data; or images."""
    length = len(inputs) // rows
    columns = [inputs[row * length : (row + 1) * length] for row in range(rows)]
    side = 0 if inputs[0].is_floating_point() else 1
    return [torch.cat(row, side) for row in zip(*columns, strict=True)]


def _steps(engine: str, model: nn.Module, rows: int) -> dict[str, Callable[[Tensor], Any]]:
    """What is timed of a model."""
    likeliest = {"likeliest": carry_on(greedy_step(model))} if _scores_all_words(model) else {}
    if engine.endswith(SCREENED):
        return likeliest
    steps = {part: step for part, step in single_steps(model).items() if part == "model" or rows == 1}
    return steps | (likeliest if engine in PACKED else {})


def _engines(arm: Arm, model: nn.Module) -> dict[str, nn.Module]:
    """The model as torch runs it, packed to each format, and in the further ways that its kind has."""
    packed = {name: arm.facts.pack(model, name) for name in PACKED}
    others = {name: make(model) for name, make in arm.facts.other_ways.items()}
    made = {"torch": model, **packed, **others}
    if _scores_all_words(model):
        screen = partial(arm.facts.pack, model, screened=DECODER)
        made |= {engine: screen(engine.removesuffix(SCREENED)) for engine in ENGINES if engine.endswith(SCREENED)}
    return made


def _scores_all_words(model: nn.Module) -> bool:
    """Whether one plain matrix scores all words: an adaptive output layer has groups, which screening can't cut."""
    return isinstance(model, LanguageModel) and isinstance(model.softmax, FullSoftmax)
