"""Measures what the rule of the gate and the shape of blocks cost: the defaults beside `topk` and equal squares.

    python benchmarks/gate_rules.py --output benchmarks/results/gate-rules_epyc-avx512_2-threads

All arms of a kind of work are timed in turns in one run, each checked against the reference first. Writes OUTPUT.json
and OUTPUT.md. Let nothing else run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import blockgate as bg
from blockgate.inspect.table import markdown_table
from blockgate.inspect.timing import in_turn, interleave
from blockgate.lab.bench import machine, report
from blockgate.lab.bench.checks import by_reference, open_gates, require_close, require_density

BLOCKS = {"64 x 64": 64, "256 x 16": (256, 16)}
KINDS = ("topk", "margin")
# What others are compared with: the default until margin gates came.
FORMER = "topk, 64 x 64"
INPUTS = 8
STEPS = 20


def layers_of(dense: nn.Linear | nn.LSTM, sparsity: float) -> dict[str, nn.Module]:
    """The dense layer, and a gated one for every rule and shape of blocks, checked."""
    layers: dict[str, nn.Module] = {"torch": dense}
    make = bg.DynamicSparseLSTM if isinstance(dense, nn.LSTM) else bg.DynamicSparseLinear
    for kind, (shape, block) in itertools.product(KINDS, BLOCKS.items()):
        layer = make.from_dense(dense, block_size=block, gate=kind, sparsity=sparsity)
        name = f"{kind}, {shape}"
        open_gates(layer).eval()
        x = torch.randn(4, dense.in_features if isinstance(dense, nn.Linear) else dense.input_size)
        with torch.no_grad():
            require_close(first(layer(x)), first(by_reference(layer)(x)), name, 1e-4)
            if isinstance(layer, bg.DynamicSparseLinear):
                require_density(layer.gates(x), layer.gate, name)
        layers[name] = layer
    return layers


def first(output: Tensor | tuple[Tensor, Any]) -> Tensor:
    """The output of a layer, without its state."""
    return output if isinstance(output, Tensor) else output[0]


def trained(layer: nn.Module) -> Callable[[Tensor], None]:
    """Forward and backward pass of a layer."""
    layer.train()

    def call(x: Tensor) -> None:
        layer.zero_grad()
        first(layer(x)).square().mean().backward()

    return call


def works(sparsity: float) -> dict[str, tuple[dict[str, Callable[[Tensor], Any]], tuple[int, ...], bool]]:
    """For each kind of work the calls of its arms, the shape of an input, and whether it needs gradients."""
    torch.manual_seed(0)
    linear = layers_of(nn.Linear(768, 3072).eval(), sparsity)
    lstm = layers_of(nn.LSTM(768, 768).eval(), sparsity)
    packed = {name: bg.pack(layer, torch.int8) for name, layer in linear.items() if name != "torch"}
    quantized = torch.ao.quantization.quantize_dynamic(nn.Sequential(linear["torch"]), {nn.Linear})
    to_train = layers_of(nn.Linear(768, 3072), sparsity)
    lstm_to_train = layers_of(nn.LSTM(768, 768), sparsity)
    return {
        "linear 3072x768, 1 row, float32": (linear, (1, 768), False),
        "linear 3072x768, 1 row, int8": ({"torch": quantized} | packed, (1, 768), False),
        "linear 3072x768, 64 rows, float32": (linear, (64, 768), False),
        "LSTM 768, 1 token, float32": (lstm, (1, 1, 768), False),
        "linear 3072x768, training, 256 rows": ({n: trained(x) for n, x in to_train.items()}, (256, 768), True),
        f"LSTM 768, training, {STEPS} x 20 tokens": (
            {name: trained(layer) for name, layer in lstm_to_train.items()},
            (STEPS, 20, 768),
            True,
        ),
    }


def measure(sparsity: float, seconds: float) -> list[dict[str, Any]]:
    """Times of every arm of every kind of work."""
    results = []
    for work, (calls, shape, gradients) in works(sparsity).items():
        inputs = [torch.randn(shape) for _ in range(INPUTS)]
        with torch.set_grad_enabled(gradients):
            timings = interleave({name: in_turn(inputs, call) for name, call in calls.items()}, seconds=seconds)
        results.append({"work": work, "arms": {name: asdict(timing) for name, timing in timings.items()}})
        print(f"{work} done", file=sys.stderr)
    return results


def markdown(data: dict[str, Any]) -> str:
    """A row for each kind of work: how many times faster than the former default, and that one than torch."""
    names = [name for name in data["results"][0]["arms"] if name not in ("torch", FORMER)]
    head = ["work", "former over torch", *names]
    rows = []
    for result in data["results"]:
        medians = {name: timing["median"] for name, timing in result["arms"].items()}
        ratios = [medians["torch"] / medians[FORMER], *(medians[FORMER] / medians[name] for name in names)]
        rows.append([result["work"], *(f"{ratio:.2f}x" for ratio in ratios)])
    facts = "; ".join(f"{name} {value}" for name, value in data["machine"].items())
    return (
        f"# The rule of the gate and the shape of blocks, {data['sparsity']:.0%} sparse\n\n`{data['command']}`\n\n"
        f"{facts}; load average {data['load']:.1f} at the start.\n\n"
        f"Speed over the former default ({FORMER}): 1 is equal, less is slower. One run for each kind of work with the "
        "arms interleaved, gate and selection inside; ratios of medians. torch is float32, or its dynamic int8 beside "
        "int8.\n\n" + markdown_table(head, rows) + "\n"
    )


def main() -> None:
    """Measures, and writes both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sparsity", type=float, default=0.75)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each arm")
    parser.add_argument("--output", type=Path, required=True, help="path of the files without .json and .md")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    results = measure(options.sparsity, options.seconds)
    data = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine.describe(),
        "load": load,
        "sparsity": options.sparsity,
        "results": results,
    }
    print("wrote", *report.write_report(options.output, markdown(data), data))


if __name__ == "__main__":
    main()
