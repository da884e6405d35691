"""How the time of one row falls with the share of open blocks: int8 and int4, over our own dense product.

Run from the root of the repository, on an otherwise idle machine:

    python benchmarks/integer_density.py --output benchmarks/results/integer-density_NAME

Warm: one layer, another input on every call. Cold: so many layers in turn that what they read in a round is more than
the last-level cache holds. Writes OUTPUT.json and OUTPUT.md.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import blockgate as bg
from blockgate.inspect.timing import Timing, in_turn, interleave
from blockgate.lab.bench import machine

if TYPE_CHECKING:
    from collections.abc import Callable

OUTPUTS, INPUTS = 6144, 1536
BLOCKS: tuple[int | tuple[int, int], ...] = (128, (256, 16))
SPARSITIES = (0.0, 0.5, 0.75, 0.9)
COPIES = 40


def sharing(layer: nn.Module, sparsity: float) -> nn.Module:
    """A layer with the same tensors and its own sparsity."""
    tensors = {id(t): t for t in [*layer.parameters(), *layer.buffers()]}
    made = copy.deepcopy(layer, tensors)
    made.sparsity = sparsity
    return made


def arms_of(stored_as: str, xs: list[torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Calls by name: dense and gated, each warm and cold."""

    def both(name: str, layers: list[nn.Module]) -> dict[str, Callable[[], Any]]:
        pairs = [(layer, xs[i % len(xs)]) for i, layer in enumerate(layers)]
        # A copy gathers its blocks in memory when it is first called.
        for layer, x in pairs:
            layer(x)
        return {
            f"{name}, warm": in_turn(xs, layers[0]),
            f"{name}, cold": in_turn(pairs, lambda pair: pair[0](pair[1])),
        }

    dense = bg.pack(nn.Linear(INPUTS, OUTPUTS), stored_as)
    arms = both("dense", [copy.deepcopy(dense) for _ in range(COPIES)])
    for block in BLOCKS:
        layer = bg.DynamicSparseLinear(INPUTS, OUTPUTS, block_size=block, key_size=128)
        packed = bg.pack(layer.eval(), stored_as)
        copies = [copy.deepcopy(packed) for _ in range(COPIES)]
        for sparsity in SPARSITIES:
            arms |= both(f"{block}, {sparsity:.0%} closed", [sharing(layer, sparsity) for layer in copies])
    return arms


def records_of(stored_as: str, times: dict[str, Timing]) -> list[dict[str, Any]]:
    """A record of every arm, with its speed over the dense product of the same kind."""
    return [
        {
            "format": stored_as,
            "arm": name,
            "median": timing.median,
            "p10": timing.p10,
            "speed": times[f"dense, {name.split()[-1]}"].median / timing.median,
        }
        for name, timing in times.items()
    ]


def table(records: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """All records as Markdown."""
    lines = [
        f"# One row by a layer of {OUTPUTS}x{INPUTS}, by the share of open blocks",
        "",
        ", ".join(f"{key} {value}" for key, value in about.items()),
        "",
        "Blocks are outputs x inputs, the key has 128 features, the gate is the default one and included. Speed: over "
        "the dense product of the same format, warm over warm and cold over cold.",
        "",
        "| format | arm | median, us | p10, us | speed |",
        "|---|---|--:|--:|--:|",
    ]
    lines += [
        f"| {r['format']} | {r['arm']} | {r['median'] * 1e6:.1f} | {r['p10'] * 1e6:.1f} | {r['speed']:.2f} |"
        for r in records
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures every format and writes OUTPUT.json and OUTPUT.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--formats", nargs="+", default=["int8", "int4"])
    parser.add_argument("--seconds", type=float, default=0.3, help="on each arm")
    options = parser.parse_args()
    about, records = machine.describe(), []
    torch.manual_seed(0)
    xs = [torch.randn(1, INPUTS) for _ in range(16)]
    with torch.inference_mode():
        for stored_as in options.formats:
            records += records_of(stored_as, interleave(arms_of(stored_as, xs), seconds=options.seconds))
    options.output.with_suffix(".json").write_text(json.dumps({**about, "records": records}, indent=1) + "\n")
    options.output.with_suffix(".md").write_text(table(records, about))


if __name__ == "__main__":
    main()
