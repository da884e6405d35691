"""Tokens per second of the trained models, all side by side, and the speed of their layers at several sparsities."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blockgate.convert import pack
from blockgate.inspect import record_gates
from blockgate.lab.bench.checks import PACKED_TYPES, open_gates
from blockgate.lab.bench.comparison import Arm, Comparison, ComparisonResult, run_comparison
from blockgate.lab.bench.decoding import require_same, single_steps
from blockgate.lab.bench.engines import torch_int8, without_onednn
from blockgate.lab.bench.timing import in_turn
from blockgate.lab.demo.arms import DemoArm, TrainedArm
from blockgate.schedule import set_sparsity

__all__ = ["INPUTS", "SPARSITIES", "Way", "time_layers", "time_models", "ways_to_run"]

PACKED = {name: PACKED_TYPES[name] for name in ("fp32", "int8")}
SPARSITIES = (0.0, 0.25, 0.5, 0.75, 0.9)
# Words that are read in turn.
INPUTS = 64

TORCH, TORCH_WITHOUT = "torch fp32", "torch fp32, oneDNN off"


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A model made ready to run in one way; torch's two ways for float32 are what all others are compared with."""

    arm: DemoArm
    engine: str
    model: nn.Module
    without_onednn: bool = False
    rival: bool = False

    @property
    def name(self) -> str:
        """Of the model and the way."""
        return f"{self.arm.label} / {self.engine}"


def ways_to_run(arms: list[TrainedArm], inputs: list[Tensor]) -> tuple[list[Way], dict[str, str]]:
    """Every arm packed to float32 and to int8, and the dense one in torch; what can't run here, with the reason.

    Packed models are compared with the trained ones first: what computes something else is not timed.
    """
    dense = next(one for one in arms if one.arm.sparsity is None)
    ways = [
        Way(arm=dense.arm, engine=TORCH, model=dense.trained.model, rival=True),
        Way(arm=dense.arm, engine=TORCH_WITHOUT, model=dense.trained.model, without_onednn=True, rival=True),
    ]
    left_out = {}
    try:
        with warnings.catch_warnings():
            # torch announces that this will move to another package.
            warnings.simplefilter("ignore")
            quantised = torch_int8(dense.trained.model)
            single_steps(quantised)["model"](inputs[0])
        ways.append(Way(arm=dense.arm, engine="torch int8", model=quantised))
    except (ImportError, RuntimeError, NotImplementedError) as error:
        left_out["torch int8"] = str(error).splitlines()[0]
    for one in arms:
        for short, dtype in PACKED.items():
            way = Way(arm=one.arm, engine=f"blockgate {short}", model=pack(one.trained.model, dtype))
            require_same(way.name, way.model, one.trained.model, inputs, exact=dtype == torch.float32)
            ways.append(way)
    return ways, left_out


def time_models(
    ways: list[Way], inputs: list[Tensor], *, seconds: float, progress: Callable[[], None]
) -> ComparisonResult:
    """One token after the other through whole models, at batch 1, decoder included."""
    arms = [
        Arm(name=way.name, call=_call(way.model, "model", inputs, way.without_onednn), rival=way.rival) for way in ways
    ]
    return run_comparison(Comparison(work="one token, whole model", arms=arms), seconds=seconds, progress=progress)


def time_layers(
    ways: list[Way], gated: TrainedArm, inputs: list[Tensor], *, seconds: float, progress: Callable[[], None]
) -> dict[str, Any]:
    """One token after the other through the recurrent layers only: dense ones, and gated ones at several sparsities.

    Trained gates may open fewer blocks than they are allowed to, even at sparsity 0. Here fresh ones take their place,
    which open exactly as many, so that the whole range of densities is seen.

    Args:
        ways: all; those of the dense model take part.
        gated: whose layers are timed, at each of SPARSITIES.
        inputs: words (1, 1).
        seconds: to spend on each.
        progress: called now and then.

    Returns:
        `dense`: seconds by engine; `fastest_torch`: which of them is compared with; `points`: for each sparsity and
        engine the measured density, seconds, and the speed-up over torch and over the dense model packed alike.
    """
    arms = [
        Arm(name=way.engine, call=_call(way.model, "layers", inputs, way.without_onednn), rival=way.rival)
        for way in ways
        if way.arm.sparsity is None
    ]
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
    dense = {way.engine: result.timings[way.engine].median for way in ways if way.arm.sparsity is None}
    return {"dense": dense, "fastest_torch": result.best_rival, "points": points}


def _call(model: nn.Module, part: str, inputs: list[Tensor], switch_off: bool = False) -> Callable[[], Any]:
    """Reads the next word. oneDNN packs torch's weights again on every call, so that torch may be faster without it."""
    read = in_turn(inputs, single_steps(model)[part])

    def call_without() -> None:
        with without_onednn():
            read()

    return call_without if switch_off else read


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
