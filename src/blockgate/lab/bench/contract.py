"""The contract: no packed layer slower than torch's, no advised gate slower than no gate, calm tails beside others."""

from __future__ import annotations

import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from blockgate.convert import pack, sparsify_
from blockgate.formats import FORMATS
from blockgate.inspect.advice import advise
from blockgate.inspect.table import markdown_table
from blockgate.inspect.timing import Timing, interleave, seconds_of
from blockgate.lab.bench.checks import open_gates
from blockgate.lab.bench.engines import torch_int8

__all__ = ["CHECKS", "Check", "Outcome", "busy_neighbours", "contract_markdown", "run_check"]

# What is promised: the time of a packed dense layer over torch's, of an advised gated layer over the packed dense one,
# and of the slowest twentieth of calls beside one busy process over the median of a quiet machine.
DENSE_LIMIT, GATED_LIMIT, TAIL_LIMIT = 1.10, 1.0, 2.5

# (out, in) features.
SHAPES = (
    (64, 64),
    (256, 256),
    (64, 8192),
    (8192, 64),
    (768, 768),
    (3072, 768),
    (1024, 4096),
    (6144, 1536),
    (8192, 8192),
)
# Every shape is measured with one row and with two of the other sizes, in turn.
BATCHES = (4, 16, 64, 256, 1024)
LARGEST_BATCH = {(8192, 8192): 64}
GATED_SHAPES = ((1024, 1024), (3072, 768), (6144, 1536))
TAIL_SHAPES = ((256, 256), (1024, 1024), (6144, 1536))
TAIL_FORMATS = ("float32", "int8")
TAIL_CALLS = 1500
# Calls before any counts: a layer learns its ways in them.
WARM_CALLS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One time and what it is held against, in seconds."""

    what: str
    rival: str
    ours: float
    theirs: float
    limit: float | None
    """Of the ratio; None where nothing is promised."""

    @property
    def ratio(self) -> float:
        """Ours over theirs: below 1 is faster."""
        return self.ours / self.theirs

    @property
    def kept(self) -> bool:
        """Whether the promise is kept."""
        return self.limit is None or self.ratio <= self.limit

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "ratio": self.ratio, "kept": self.kept}


Measure: TypeAlias = Callable[[float], list[Outcome]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A point of the grid: its title, and what measures it, given the seconds to spend on each way."""

    title: str
    measure: Measure


def run_check(check: Check, *, seconds: float) -> list[Outcome]:
    """Measures one point, without gradients."""
    torch.manual_seed(0)
    return check.measure(seconds)


@contextmanager
def busy_neighbours(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many other processes that want a core all the time."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield others
    finally:
        for other in others:
            other.kill()
            other.wait()


def _dense(out: int, inputs: int, batch: int, seconds: float) -> list[Outcome]:
    """Every format beside torch's engine for it."""
    x, layer = torch.randn(batch, inputs), nn.Linear(inputs, out).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch_int8(nn.Sequential(layer))
    # No engine of torch has the same format as the others: they are held against the next wider one.
    rivals = {"int8": "torch int8", "int8a8": "torch int8", "int4": "torch int8"}
    arms: dict[str, Callable[[], Any]] = {"torch fp32": partial(layer, x), "torch int8": partial(quantised, x)}
    arms |= {name: partial(pack(layer, name), x) for name in FORMATS}
    times = _timed(arms, seconds)
    return [
        Outcome(
            what=f"packed dense {name} {out}x{inputs}, batch {batch}",
            rival=rivals.get(name, "torch fp32"),
            ours=times[name].median,
            theirs=times[rivals.get(name, "torch fp32")].median,
            limit=DENSE_LIMIT if name in {"float32", "int8", "int8a8"} else None,
        )
        for name in FORMATS
    ]


def _gated(out: int, inputs: int, batch: int, stored_as: str, seconds: float) -> list[Outcome]:
    """What `advise` recommends beside the packed dense layer; nothing if it recommends to leave it."""
    x = torch.randn(batch, inputs)
    # The last linear layer would be left dense as an output head.
    model = nn.Sequential(nn.Linear(inputs, out), nn.Linear(out, 16)).eval()
    dense = pack(model[0], stored_as)
    advice = advise(model, x, formats=[stored_as], store=None, seconds=10 * seconds)
    if not advice.to_gate:
        return []
    sparsify_(model, advice)
    gated = pack(open_gates(model[0].eval()), stored_as)
    times = _timed({"dense": partial(dense, x), "gated": partial(gated, x)}, seconds)
    (chosen,) = advice.to_gate
    return [
        Outcome(
            what=f"gated {stored_as} {advice.sparsity:.0%} {out}x{inputs}, batch {batch}, "
            f"blocks {chosen.block_size}, key {chosen.key_size}",
            rival=f"packed dense {stored_as}",
            ours=times["gated"].median,
            theirs=times["dense"].median,
            limit=GATED_LIMIT,
        )
    ]


def _crowded(out: int, inputs: int, stored_as: str, seconds: float) -> list[Outcome]:  # noqa: ARG001
    """The tail of single rows beside busy processes, over the median without."""
    x, layer = torch.randn(1, inputs), nn.Linear(inputs, out).eval()
    arms = {"packed dense": pack(layer, stored_as), "torch": layer}
    outcomes = []
    for name, arm in arms.items():
        call = partial(arm, x)
        quiet = statistics.median(_calls(call, WARM_CALLS, TAIL_CALLS))
        for count in (1, 2):
            with busy_neighbours(count):
                times = sorted(_calls(call, WARM_CALLS, TAIL_CALLS))
            outcomes.append(
                Outcome(
                    what=f"{name} {stored_as if name != 'torch' else 'fp32'} {out}x{inputs}, batch 1, "
                    f"{count} busy neighbours, p95 (p99 {1e3 * times[int(0.99 * len(times))]:.3f} ms)",
                    rival="its quiet median",
                    ours=times[int(0.95 * len(times))],
                    theirs=quiet,
                    limit=TAIL_LIMIT if count == 1 and name != "torch" else None,
                )
            )
    return outcomes


@torch.inference_mode()
def _calls(call: Callable[[], Any], warm: int, count: int) -> list[float]:
    return [seconds_of(call) for _ in range(warm + count)][warm:]


@torch.inference_mode()
def _timed(arms: dict[str, Callable[[], Any]], seconds: float) -> dict[str, Timing]:
    for call in arms.values():
        once = seconds_of(call)
        for _ in range(min(WARM_CALLS, int(seconds / once))):
            call()
    return interleave(arms, seconds=seconds)


def _checks() -> Iterator[Check]:
    for place, (out, inputs) in enumerate(SHAPES):
        others = {BATCHES[(2 * place) % len(BATCHES)], BATCHES[(2 * place + 1) % len(BATCHES)]}
        most = LARGEST_BATCH.get((out, inputs), max(BATCHES))
        for batch in (1, *sorted({min(most, other) for other in others})):
            yield Check(title=f"dense {out}x{inputs}, batch {batch}", measure=partial(_dense, out, inputs, batch))
    for (out, inputs), batch, name in ((s, b, f) for s in GATED_SHAPES for b in (1, 16) for f in ("float32", "int8")):
        title = f"gated {name} {out}x{inputs}, batch {batch}"
        yield Check(title=title, measure=partial(_gated, out, inputs, batch, name))
    for (out, inputs), name in ((shape, name) for shape in TAIL_SHAPES for name in TAIL_FORMATS):
        yield Check(title=f"crowded {name} {out}x{inputs}", measure=partial(_crowded, out, inputs, name))


CHECKS: Sequence[Check] = tuple(_checks())


def contract_markdown(outcomes: Sequence[Outcome]) -> str:
    """What is violated, then everything that was measured."""
    broken = [outcome for outcome in outcomes if not outcome.kept]
    promised = sum(outcome.limit is not None for outcome in outcomes)
    said = f"\n**{len(broken)} of {promised} promises are broken**" if broken else f"\nAll {promised} promises are kept"
    lines = [f"{said}; the other rows promise nothing.\n\n"]
    worst = sorted(broken, key=lambda outcome: outcome.ratio, reverse=True)
    lines += [f"- {o.what}: {o.ratio:.2f}x the time of {o.rival}, promised {o.limit}x\n" for o in worst]
    head = ["what", "held against", "ms", "its ms", "ratio", "promised"]
    rows = [
        [o.what, o.rival, f"{1e3 * o.ours:.3f}", f"{1e3 * o.theirs:.3f}", _ratio(o), f"{o.limit}x" if o.limit else ""]
        for o in outcomes
    ]
    return "".join(lines) + "\n" + markdown_table(head, rows)


def _ratio(outcome: Outcome) -> str:
    return f"{outcome.ratio:.2f}x" if outcome.kept else f"**{outcome.ratio:.2f}x**"
