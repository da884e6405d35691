"""The call itself: layers, their calls, their times, the advice."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blockgate.convert.candidates import Candidate, find_candidates, reason_to_leave, refusal
from blockgate.convert.closeness import run_example
from blockgate.errors import invalid
from blockgate.formats import FORMATS as KNOWN
from blockgate.formats import get_format
from blockgate.inspect.advice.calls import Calls, see_calls
from blockgate.inspect.advice.conclusions import Advice, Measured, draw_advice
from blockgate.inspect.advice.measure import BLOCKS, KEYS, SPARSITIES, Way, first_ways, measure, more_ways
from blockgate.inspect.advice.store import Store, default_store
from blockgate.inspect.advice.training import with_training
from blockgate.inspect.timing import cache_bytes, seconds_of
from blockgate.spec import GateSpec

__all__ = ["FORMATS", "advise"]

FORMATS = tuple(KNOWN)

# Seconds for one way to run one layer, at least and at most.
LEAST, MOST = 0.02, 0.2
# Runs of the whole model: the first one warms up.
MODEL_RUNS = 8


def advise(
    model: nn.Module,
    example_input: Any,
    *,
    sparsity: float = 0.75,
    formats: Sequence[str] = FORMATS,
    store: Path | str | None = "",
    again: bool = False,
    seconds: float = 30.0,
    progress: Callable[[int, int], None] | None = None,
) -> Advice:
    """Measures on this machine, before any training, which layers of a model are worth gates, and what that brings.

    Every layer that can be gated or packed is timed for the inputs that the example gives it: as it is, packed, and
    gated with a few block and key sizes, in each format, with weights in the cache and outside of it. Layers that are
    worth gates are timed in a step of training, too, for 256 rows: at sparsity 0, where a ramp begins, and at the level
    planned for. Gates are fresh: whether the model stays as good is another question. Let nothing else run meanwhile.

    Args:
        model: dense, in float32, on the CPU. It is left as it is.
        example_input: a tensor, a tuple of arguments or a dict of keyword arguments, of the size that is to be fast:
            one row for a model that answers one at a time.
        sparsity: the level to plan for: 0.5, 0.75 or 0.9.
        formats: those to choose from, by their names in `blockgate.formats`; all of them if not given.
        store: the file in which times are kept, by processor, instruction set, threads, shape and build of the
            kernels; "" for one in the user's cache, None to keep nothing.
        again: measure what was measured before, too.
        seconds: to spend on the layers together, about; preparing them takes as long again.
        progress: called with how many layers are measured, and of how many.

    Returns:
        The advice; print it for a table and its warnings. `bg.sparsify_(model, advice)` gates what it says, and
        `bg.pack(model, advice.format, filter_fn=advice.packs)` packs it.
    """
    _check(model, sparsity, formats, seconds)
    names = [get_format(name).name for name in formats]
    candidates = [candidate for candidate in find_candidates(model) if not refusal(candidate.module)]
    if not candidates:
        raise invalid(
            "advise",
            expected="a model with layers that can be gated or packed",
            got=type(model).__name__,
            remedy="nn.Linear, nn.LSTM, nn.GRU, their cells, QRNN and Conv1D can.",
        )
    calls = see_calls(model, [candidate.module for candidate in candidates], example_input)
    known = Store(default_store() if store == "" else None if store is None else Path(store), again)
    cold = sum(p.nbytes for p in model.parameters()) > cache_bytes()
    works = _works(candidates, calls)
    for done, work in enumerate(works.values()):
        if progress is not None:
            progress(done, len(works))
        work.measure(known, names, sparsity, cold, seconds / len(works))
    if progress is not None:
        progress(len(works), len(works))
    runs = [seconds_of(lambda: run_example(model, example_input)) for _ in range(MODEL_RUNS)]
    measured = [_measured(candidate, calls[candidate.module], works) for candidate in candidates]
    advice = draw_advice(measured, names, statistics.median(runs[1:]), sparsity, cold)
    # Those that are worth gates have been called; their matrices may have more inputs than they themselves.
    layers = ((c.name, c.module, _key(c, ()), shape[-1]) for c in candidates for shape in calls[c.module])
    return with_training(advice, layers, known)


def _check(model: nn.Module, sparsity: float, formats: Sequence[str], seconds: float) -> None:
    if not isinstance(model, nn.Module):
        raise invalid("advise", expected="an nn.Module", got=type(model).__name__, remedy="Pass a model.")
    if sparsity not in SPARSITIES:
        raise invalid("sparsity", expected=f"one of {SPARSITIES}", got=sparsity, remedy="These are measured.")
    if isinstance(formats, str) or not formats:
        raise invalid("formats", expected="names of formats", got=formats, remedy='Such as ("float32", "int8").')
    if not 0 < seconds < math.inf:
        raise invalid("seconds", expected="a positive number", got=seconds, remedy="30 is the default.")
    other = next((p for p in model.parameters() if p.device.type != "cpu" or p.dtype != torch.float32), None)
    if other is not None:
        raise invalid(
            "advise",
            expected="a model in float32 on the CPU, whose kernels these are",
            got=f"{other.dtype} on {other.device}".replace("torch.", ""),
            remedy="Measure a copy: copy.deepcopy(model).float().cpu().",
        )


@dataclass(slots=True)
class _Work:
    """Layers of one kind, one shape and inputs of one shape: they are measured once."""

    candidate: Candidate
    shape: tuple[int, ...]
    key: str
    seconds: dict[Way, float]

    def measure(self, known: Store, formats: list[str], sparsity: float, cold: bool, budget: float) -> None:
        """Fills in `seconds`: all blocks and keys at one sparsity, then the best of them at the others."""
        ways = first_ways(formats, _specs(self.candidate), sparsity)
        each = min(MOST, max(LEAST, budget / (len(ways) + len(formats) * (len(SPARSITIES) - 1))))
        for _ in range(2):
            missing = [way for way in ways if way not in known.get(self.key, ways)]
            if missing:
                known.put(self.key, measure(self.candidate.module, self.shape, missing, seconds=each))
            times = known.get(self.key, ways)
            self.seconds |= {way: found.cold if cold else found.warm for way, found in times.items()}
            ways = more_ways(self.seconds)


def _specs(candidate: Candidate) -> list[tuple[tuple[int, int], int]]:
    """The blocks and keys that the layer is large enough for; none for one that is to stay dense anyway."""
    found = [
        (block, key)
        for block, key in itertools.product(BLOCKS, KEYS)
        if not reason_to_leave(candidate, GateSpec(block_size=block, key_size=key))
    ]
    narrowest = min((grid.in_features for grid in candidate.grids(GateSpec())), default=0)
    return [(block, key) for block, key in found if key <= narrowest]


def _key(candidate: Candidate, shape: tuple[int, ...]) -> str:
    # Two layers of one shape may differ in what may be done to them: the last one is the output layer.
    kind = f"{candidate.kind}{', dense' if not _specs(candidate) else ''}"
    return f"{kind} {_matrices(candidate)}, input {' x '.join(map(str, shape))}"


def _matrices(candidate: Candidate) -> str:
    return ", ".join(f"{grid.out_features}x{grid.in_features}" for grid in candidate.grids(GateSpec()))


def _works(candidates: list[Candidate], calls: dict[nn.Module, Calls]) -> dict[str, _Work]:
    works: dict[str, _Work] = {}
    for candidate, shape in ((c, shape) for c in candidates for shape in calls[c.module]):
        key = _key(candidate, shape)
        works.setdefault(key, _Work(candidate, shape, key, {}))
    return works


def _measured(candidate: Candidate, calls: Calls, works: dict[str, _Work]) -> Measured:
    # The best gated way may differ between the shapes of a layer's inputs: only ways that all of them have are summed.
    parts = [(works[_key(candidate, shape)].seconds, count) for shape, count in calls.items()]
    shared = set.intersection(*(set(seconds) for seconds, _ in parts)) if parts else set()
    return Measured(
        name=candidate.name,
        kind=candidate.kind,
        matrices=_matrices(candidate),
        calls=", ".join(f"{count} of {'x'.join(map(str, shape))}" for shape, count in calls.items()) or "none",
        seconds={way: sum(count * seconds[way] for seconds, count in parts) for way in shared},
        leave=reason_to_leave(candidate, GateSpec()),
    )
