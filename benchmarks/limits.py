"""Where gates do not pay: small and shallow models, small batches, and training before sparsity has risen.

Run from the root of the repository, on an otherwise idle machine:

    python benchmarks/limits.py --output benchmarks/results/limits_NAME

Inference is of whole models without gradients, packed to float32; training is forward and backward with gradients of
all parameters. Gates are fresh ones with margins, which open what is asked for. Models have three linear or two LSTM
layers of one width. Writes OUTPUT.json and OUTPUT.md.
"""

from __future__ import annotations

import argparse
import copy
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import blockgate as bg
from blockgate.inspect.timing import interleave
from blockgate.lab.bench import machine
from blockgate.lab.bench.engines import without_onednn
from blockgate.lab.bench.report import write_report

STEPS = 35  # of a sequence

# A case is unreliable if slow calls (p90) of one of its ways take more than so many times as long as fast ones (p10).
MOST_SPREAD = 1.5


@dataclass(frozen=True)
class Case:
    """A model, what is done with it, and the block size of its gates."""

    model: str
    width: int
    batch: int
    block: int | tuple[int, int]
    training: bool
    sparsities: tuple[float, ...]

    @property
    def title(self) -> str:
        """For the table."""
        layers = "LSTM, 2 layers" if self.model == "lstm" else "MLP, 3 layers"
        return f"{layers} of {self.width}"


RAMP = (0.0, 0.5, 0.75)
CASES = (
    Case("lstm", 256, 32, 32, False, (0.5, 0.75)),
    Case("lstm", 256, 32, 32, True, RAMP),
    Case("mlp", 256, 128, 64, True, RAMP),
    Case("mlp", 512, 8, 64, False, (0.5, 0.75)),
    Case("mlp", 512, 128, 64, True, RAMP),
    Case("mlp", 1536, 8, (256, 16), False, (0.5, 0.75)),
    Case("mlp", 1536, 256, (256, 16), True, RAMP),
)


def dense_model(case: Case) -> nn.Module:
    """The model of a case, without gates."""
    torch.manual_seed(0)
    if case.model == "lstm":
        return nn.LSTM(case.width, case.width, 2)
    layers = [layer for _ in range(3) for layer in (nn.Linear(case.width, case.width), nn.ReLU())]
    return nn.Sequential(*layers)


def call_of(model: nn.Module, case: Case) -> Callable[[], Any]:
    """A call without gradients, or a step of training."""
    x = torch.randn(STEPS, case.batch, case.width) if case.model == "lstm" else torch.randn(case.batch, case.width)
    model.train(case.training)

    def infer() -> None:
        with torch.inference_mode():
            model(x)

    def learn() -> None:
        model.zero_grad()
        y = model(x)
        (y[0] if isinstance(y, tuple) else y).square().mean().backward()

    return learn if case.training else infer


def measure(case: Case, seconds: float) -> list[dict[str, Any]]:
    """A record for each sparsity: its speed over torch, and over the dense model packed by blockgate."""
    dense = dense_model(case)
    torch_call = call_of(copy.deepcopy(dense), case)

    def slow_path() -> None:
        with without_onednn():
            torch_call()

    calls = {"torch": torch_call}
    if case.model == "lstm":  # which oneDNN may make slower
        calls["torch without oneDNN"] = slow_path
    if not case.training:
        calls["packed dense"] = call_of(bg.pack(dense.eval(), "float32"), case)
    for sparsity in case.sparsities:
        gated = copy.deepcopy(dense)
        # A container, since a layer can't replace itself.
        holder = nn.ModuleList([gated])
        bg.sparsify_(holder, block_size=case.block, sparsity=sparsity, filter_fn=lambda *_: True)
        gated = holder[0]
        calls[f"{sparsity:.0%}"] = call_of(gated if case.training else bg.pack(gated.eval(), "float32"), case)
    times = interleave(calls, seconds=seconds)
    rival = min(timing.median for name, timing in times.items() if name.startswith("torch"))
    packed = times["packed dense"].median if "packed dense" in times else None
    return [
        asdict(case)
        | {
            "title": case.title,
            "sparsity": sparsity,
            "torch_seconds": rival,
            "seconds": times[f"{sparsity:.0%}"].median,
            "p10": times[f"{sparsity:.0%}"].p10,
            "p90": times[f"{sparsity:.0%}"].p90,
            "over_torch": rival / times[f"{sparsity:.0%}"].median,
            "over_packed_dense": None if packed is None else packed / times[f"{sparsity:.0%}"].median,
        }
        for sparsity in case.sparsities
    ]


def table(records: list[dict[str, Any]], about: dict[str, Any], command: str) -> str:
    """All records as Markdown; those of cases in which some way varied too much stand apart."""
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in records:
        cases.setdefault((r["title"], r["batch"], r["training"]), []).append(r)
    steady = [r for case in cases.values() for r in case if all(one["p90"] <= MOST_SPREAD * one["p10"] for one in case)]
    lines = [
        "# Where gates do not pay",
        "",
        f"`{command}`",
        "",
        "; ".join(f"{name} {value}" for name, value in about.items()) + ".",
        "",
        "Whole models, gates included, in float32. Below 1.00x the gated model is slower. LSTMs read sequences of "
        f"{STEPS} steps.",
    ]
    parts = {"Measured": steady, "Machine busy: times unreliable": [r for r in records if r not in steady]}
    for title, rows in parts.items():
        lines += ["", f"## {title}", "", *_rows(rows)] if rows else []
    return "\n".join(lines) + "\n"


def _rows(records: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| model | work | batch | block | sparsity | torch ms | gated ms | over torch | over packed dense |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for r in records:
        block = r["block"] if isinstance(r["block"], int) else "x".join(map(str, r["block"]))
        packed = "" if r["over_packed_dense"] is None else f"{r['over_packed_dense']:.2f}x"
        lines.append(
            f"| {r['title']} | {'training' if r['training'] else 'inference'} | {r['batch']} | {block} | "
            f"{r['sparsity']:.0%} | {r['torch_seconds'] * 1e3:.2f} | {r['seconds'] * 1e3:.2f} | "
            f"{r['over_torch']:.2f}x | {packed} |"
        )
    return lines


def main(output: Path, seconds: float, only: str) -> None:
    """Measures all cases, and writes the report."""
    others, about = machine.Others(), machine.describe()
    records = []
    for case in (case for case in CASES if only in case.title):
        print(case, flush=True)
        records += measure(case, seconds)
    about["used by other processes"] = str(others)
    command = shlex.join(["python", "benchmarks/limits.py", *sys.argv[1:]])
    text = table(records, about, command)
    write_report(output, text, {"command": command, "machine": about, "results": records})
    print(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--only", default="")
    main(**vars(parser.parse_args()))
