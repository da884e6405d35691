"""Tokens per second of the trained models, all side by side, and the speed of their layers at several sparsities.

Every way to run the dense model is a rival: torch's float32 and int8, other engines where they are installed, and the
dense model packed by blockgate. What gated models are compared with is the fastest of them.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blockgate.convert import pack
from blockgate.inspect import record_gates
from blockgate.inspect.timing import Timing, carry_on, in_turn
from blockgate.lab.bench.checks import PACKED_TYPES, open_gates, relative_error
from blockgate.lab.bench.comparison import Arm, Comparison, ComparisonResult, run_comparison
from blockgate.lab.bench.decoding import require_same, single_steps
from blockgate.lab.bench.engines import Step, engines, torch_int8, without_onednn
from blockgate.lab.demo.arms import DemoArm, TrainedArm
from blockgate.lab.models import LanguageModel
from blockgate.schedule import set_sparsity

__all__ = ["INPUTS", "SPARSITIES", "Way", "busy_reason", "time_layers", "time_models", "ways_to_run"]

PACKED = {name: PACKED_TYPES[name] for name in ("fp32", "int8")}
SPARSITIES = (0.0, 0.25, 0.5, 0.75, 0.9)
# Words that are read in turn.
INPUTS = 64

TORCH, TORCH_WITHOUT = "torch fp32", "torch fp32, oneDNN off"
OTHER_ENGINES = ("ONNX Runtime fp32", "ONNX Runtime int8")

# Times are reliable if other processes use no more than this many cores beside the idle ones, and if slow calls (p90)
# take no more than so many times as long as fast ones (p10).
MOST_OTHERS = 0.25
# On a quiet machine our own layers, which try their ways now and then, reached 1.6.
MOST_SPREAD = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A model made ready to run in one way; every way to run the dense model is a rival of the gated ones.

    Args:
        arm: the model.
        engine: what runs it.
        model: as a module; None if the engine has a call for single words only.
        step: that call.
        without_onednn: switch oneDNN off around it.
    """

    arm: DemoArm
    engine: str
    model: nn.Module | None = None
    step: Step | None = None
    without_onednn: bool = False

    @property
    def name(self) -> str:
        """Of the model and the way."""
        return f"{self.arm.label} / {self.engine}"

    @property
    def rival(self) -> bool:
        """Whether it is one of those that gated models are compared with."""
        return self.arm.sparsity is None


def ways_to_run(arms: list[TrainedArm], inputs: list[Tensor]) -> tuple[list[Way], dict[str, str]]:
    """The dense model in torch and in other engines, and every arm packed; what can't run here, with the reason.

    Packed models are compared with the trained ones first: what computes something else is not timed.
    """
    dense = next(one for one in arms if one.arm.sparsity is None)
    ways = [
        Way(arm=dense.arm, engine=TORCH, model=dense.trained.model),
        Way(arm=dense.arm, engine=TORCH_WITHOUT, model=dense.trained.model, without_onednn=True),
    ]
    left_out: dict[str, str] = {}
    try:
        with warnings.catch_warnings():
            # torch announces that this will move to another package.
            warnings.simplefilter("ignore")
            quantised = torch_int8(dense.trained.model)
            single_steps(quantised)["model"](inputs[0])
        ways.append(Way(arm=dense.arm, engine="torch int8", model=quantised))
    except (ImportError, RuntimeError, NotImplementedError) as error:
        left_out["torch int8"] = str(error).splitlines()[0]
    ways += _other_engines(dense, inputs, left_out)
    for one in arms:
        for short, dtype in PACKED.items():
            packed = pack(one.trained.model, dtype)
            way = Way(arm=one.arm, engine=f"blockgate {short}", model=packed)
            require_same(way.name, packed, one.trained.model, inputs, exact=dtype == torch.float32)
            ways.append(way)
    return ways, left_out


def _other_engines(dense: TrainedArm, inputs: list[Tensor], left_out: dict[str, str]) -> list[Way]:
    """The dense model in the engines that are installed; the others go to `left_out`."""
    model, ways = dense.trained.model, []
    assert isinstance(model, LanguageModel)
    for engine in OTHER_ENGINES:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step = engines(inputs[0])[engine](model)
                given, wanted = step(inputs[0], None)[0], model(inputs[0], None)[0]
        # Engines of others raise what they like; one that can't run here is left out.
        except Exception as failure:
            left_out[engine] = str(failure).splitlines()[0]
            continue
        error = relative_error(torch.as_tensor(given), wanted)
        if error < (1e-2 if "fp32" in engine else 0.5):
            ways.append(Way(arm=dense.arm, engine=engine, step=step))
        else:
            left_out[engine] = f"its outputs differ from the trained model's by {error:.2g} of their norm"
    return ways


def busy_reason(others: float | None, threads: int, timings: Sequence[Timing]) -> str | None:
    """Why times can't be trusted, in a few words; None if they can.

    Args:
        others: cores that other processes used meanwhile; None if unknown.
        threads: that the timed models used.
        timings: of what is compared: the fastest dense way and the gated ones.
    """
    cores = os.cpu_count() or threads
    if others is not None and others > max(0, cores - threads) + MOST_OTHERS:
        return f"other processes used {others:.1f} of {cores} cores"
    worst = max(timing.spread for timing in timings)
    if worst > MOST_SPREAD:
        return f"slow calls took {worst:.1f} times as long as fast ones"
    return None


def time_models(
    ways: list[Way], inputs: list[Tensor], *, seconds: float, progress: Callable[[], None]
) -> ComparisonResult:
    """One token after the other through whole models, at batch 1, decoder included."""
    arms = [Arm(name=way.name, call=_call_way(way, "model", inputs), rival=way.rival) for way in ways]
    return run_comparison(Comparison(work="one token, whole model", arms=arms), seconds=seconds, progress=progress)


def time_layers(
    ways: list[Way], gated: TrainedArm, inputs: list[Tensor], *, seconds: float, progress: Callable[[], None]
) -> tuple[dict[str, Any], list[Timing]]:
    """One token after the other through the recurrent layers only: dense ones, and gated ones at several sparsities.

    Trained gates may open fewer blocks than they are allowed to, even at sparsity 0. Here fresh ones take their place,
    which open exactly as many, so that the whole range of densities is seen.

    Args:
        ways: all; those of the dense model that are modules take part.
        gated: whose layers are timed, at each of SPARSITIES.
        inputs: words (1, 1).
        seconds: to spend on each.
        progress: called now and then.

    Returns:
        Facts: `dense`: seconds by engine; `fastest_dense`: which of them is compared with; `points`: for each sparsity
        and engine the measured density, seconds, and the speed-up over the fastest dense layers and over those packed
        alike. And the times of what is compared.
    """
    dense = [way for way in ways if way.rival and way.model is not None]
    arms = [Arm(name=way.engine, call=_call_way(way, "layers", inputs), rival=True) for way in dense]
    densities = {}
    for sparsity in SPARSITIES:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = open_gates(copy.deepcopy(gated.trained.model))
        set_sparsity(model, sparsity)
        densities[sparsity] = _density(model, inputs)
        for short, dtype in PACKED.items():
            packed = pack(model, dtype)
            name = f"blockgate {short} at {sparsity:.0%}"
            require_same(name, packed, model, inputs, exact=dtype == torch.float32)
            arms.append(Arm(name=name, call=_call(packed, "layers", inputs)))
    compared = Comparison(work="one token, layers", arms=arms)
    result = run_comparison(compared, seconds=seconds, progress=progress)
    points = []
    for sparsity in SPARSITIES:
        for short in PACKED:
            name = f"blockgate {short} at {sparsity:.0%}"
            own = result.timings[f"blockgate {short}"].median / result.timings[name].median
            points.append({
                "sparsity": sparsity,
                "density": densities[sparsity],
                "engine": f"blockgate {short}",
                "seconds": result.timings[name].median,
                "speedup": result.speedup(name),
                "speedup_over_packed_dense": own,
            })
    seconds_of_dense = {way.engine: result.timings[way.engine].median for way in dense}
    compared_with = [result.timings[result.best_rival]]
    ours = [result.timings[arm.name] for arm in arms if not arm.rival]
    return {"dense": seconds_of_dense, "fastest_dense": result.best_rival, "points": points}, compared_with + ours


def _call_way(way: Way, part: str, inputs: list[Tensor]) -> Callable[[], Any]:
    """Reads the next word. oneDNN packs torch's weights again on every call, so that torch may be faster without it."""
    if way.model is None:
        assert way.step is not None
        return in_turn(inputs, carry_on(way.step))
    read = _call(way.model, part, inputs)

    def call_without() -> None:
        with without_onednn():
            read()

    return call_without if way.without_onednn else read


def _call(model: nn.Module, part: str, inputs: list[Tensor]) -> Callable[[], Any]:
    return in_turn(inputs, single_steps(model)[part])


@torch.no_grad()
def _density(model: nn.Module, inputs: list[Tensor]) -> float:
    """The share of the weights that inputs met, over all gated matrices."""
    step = single_steps(model)["layers"]
    with record_gates(model, coactivation=False) as record:
        for x in inputs:
            step(x)
    met = size = 0.0
    for gate in record.gates.values():
        weights = gate.grid.out_features * gate.grid.in_features
        met, size = met + weights * (gate.measured_density or 0.0), size + weights
    return met / size
