"""Measures what block size and key size cost: one layer, one row of input, at 90% sparsity.

    python benchmarks/block_size.py --output benchmarks/results/block-size_epyc-zen3_2-threads

All arms are timed in turns in one run, each checked against the reference first. Writes OUTPUT.json and OUTPUT.md;
`python docs/pictures/draw.py` draws the picture of the documentation from the JSON file. Let nothing else run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import blockgate as bg
from blockgate.inspect.timing import in_turn, interleave
from blockgate.lab.bench import machine, report
from blockgate.lab.bench.checks import by_reference, open_gates, require_close, require_density

BLOCKS = (32, 64, 128, 256)
KEYS = (64, 128, None)
INPUTS = 8
# Load average from which on times mean little.
BUSY = 0.7


def gated_layer(dense: nn.Linear, block: int, key: int | None, sparsity: float) -> bg.DynamicSparseLinear:
    """Gates on `dense` whose scores are all positive, so that exactly the asked blocks open; checked."""
    options = {"block_size": block, "key_size": key, "sparsity": sparsity, "gate": "eq1"}
    layer = bg.DynamicSparseLinear.from_dense(dense, **options).eval()
    open_gates(layer)
    x, name = torch.randn(2, dense.in_features), f"block {block}, key {key}"
    require_close(layer(x), by_reference(layer)(x), name, 1e-5)
    require_density(layer.gates(x), layer.gate, name)
    return layer


@torch.no_grad()
def measure(shape: tuple[int, int], sparsity: float, seconds: float) -> list[dict[str, Any]]:
    """An entry for each arm: dense torch, the dense layer packed by us, and every block with every key size."""
    torch.manual_seed(0)
    dense = nn.Linear(shape[1], shape[0]).eval()
    layers: dict[str, nn.Module] = {"torch fp32": dense, "packed dense": bg.pack(dense)}
    entries: list[dict[str, Any]] = [{"arm": name, "mac_share": 1.0} for name in layers]
    for block, key in itertools.product(BLOCKS, KEYS):
        if block > min(shape) or (key or 0) > shape[1]:
            continue
        layer = gated_layer(dense, block, key, sparsity)
        name = f"block {block}, key {'all' if key is None else key}"
        layers[name] = layer
        counted = bg.summary(layer)
        share = counted.macs_now / counted.macs_dense
        entries.append({
            "arm": name,
            "block": block,
            "key": layer.gate.key_size,
            "all": key is None,
            "mac_share": share,
        })
    inputs = [torch.randn(1, shape[1]) for _ in range(INPUTS)]
    calls = {name: in_turn(inputs, layer) for name, layer in layers.items()}
    warm, cold = (interleave(calls, seconds=seconds, cold=cold) for cold in (False, True))
    for entry in entries:
        entry |= {"warm": asdict(warm[entry["arm"]]), "evicted": asdict(cold[entry["arm"]])}
    return entries


def markdown(data: dict[str, Any]) -> str:
    """The entries as a table."""
    first, packed = data["results"][0], data["results"][1]
    facts = "; ".join(f"{name} {value}" for name, value in data["machine"].items())
    lines = [
        f"# Block and key size: {data['shape']}, batch 1, {data['sparsity']:.0%} sparse, float32\n",
        f"`{data['command']}`\n",
        f"{facts}; load average {data['load']:.1f} at the start.\n",
        "One run with the arms interleaved, gate and selection inside. MACs are multiply-adds, gate",
        "included, as a share of the dense layer's. Speed-ups are over `nn.Linear`, and over the dense layer packed",
        "by blockgate, which is read as fast as the gated ones are; the last column has the cache evicted before every",
        "call. They are ratios of medians.\n",
        "| arm | MACs | median ms | p10 | p90 | over nn.Linear | over packed dense | the same, evicted cache |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for entry in data["results"]:
        warm, evicted = entry["warm"], entry["evicted"]
        times = " | ".join(f"{warm[name] * 1e3:.3f}" for name in ("median", "p10", "p90"))
        over = [
            first["warm"]["median"] / warm["median"],
            packed["warm"]["median"] / warm["median"],
            packed["evicted"]["median"] / evicted["median"],
        ]
        ratios = " | ".join(f"{ratio:.2f}x" for ratio in over)
        lines.append(f"| {entry['arm']} | {entry['mac_share']:.1%} | {times} | {ratios} |")
    return "\n".join(lines) + "\n"


def main(shape: str, sparsity: float, seconds: float, output: Path | None) -> None:
    """Measures, prints, and writes the results if asked."""
    load = os.getloadavg()[0]
    if load > BUSY:
        print(f"the machine is busy (load average {load:.1f}): these times are not to be trusted", file=sys.stderr)
    out_features, in_features = map(int, shape.split("x"))
    data = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine.describe(),
        "load": load,
        "shape": shape,
        "sparsity": sparsity,
        "results": measure((out_features, in_features), sparsity, seconds),
    }
    print(markdown(data))
    if output is not None:
        print("wrote", *report.write_report(output, markdown(data), data))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="6144x1536", help="OUTxIN features")
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--seconds", type=float, default=1.0, help="time to spend on each arm")
    parser.add_argument("--output", type=Path, help="where to write the results; only print if unset")
    main(**vars(parser.parse_args()))
