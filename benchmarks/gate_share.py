"""What share of one row's native time the gate takes, by the samples of Linux's perf.

    python benchmarks/gate_share.py --output benchmarks/results/gate-share_NAME

A layer of 6144x1536 in int8 with a key of 128, on one thread. Shares are of samples in the kernels, so that other
processes change little. Writes OUTPUT.json and OUTPUT.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import blockgate as bg
from blockgate.lab.bench import machine

OUTPUTS, INPUTS, KEY = 6144, 1536, 128
BLOCKS = ((128, 128), (256, 16))
SPARSITIES = (0.5, 0.75, 0.9)
# Parts by what the names of their functions hold; the gate's weights are float32, the layer's int8.
PARTS = {"scores": "Stored<float>", "selection": "select<", "product": "Int8Pair"}


def call(block: tuple[int, int], sparsity: float, seconds: float) -> None:
    """Calls one layer for so many seconds of processor time, with another row each time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = bg.DynamicSparseLinear(INPUTS, OUTPUTS, block_size=block, key_size=KEY, sparsity=sparsity)
    packed, rows = bg.pack(layer.eval(), "int8"), [torch.randn(1, INPUTS) for _ in range(16)]
    end = time.process_time() + seconds
    with torch.inference_mode():
        while time.process_time() < end:
            for row in rows:
                packed(row)


def shares(block: tuple[int, int], sparsity: float, seconds: float) -> dict[str, Any]:
    """Shares of the samples in our library."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "perf.data"
        again = [sys.executable, __file__, "--call", *map(str, block), "--sparsity", str(sparsity)]
        recorded = ["perf", "record", "-q", "-o", str(data), *again, "--seconds", str(seconds)]
        subprocess.run(recorded, check=True, capture_output=True)
        report = ["perf", "report", "-i", str(data), "--stdio", "--sort", "symbol", "-t", ";"]
        text = subprocess.run(report, check=True, capture_output=True, text=True).stdout
    counted = dict.fromkeys([*PARTS, "rest"], 0.0)
    for line in text.splitlines():
        share, _, symbol = line.partition(";")
        if "blockgate::" in symbol:
            part = next((part for part, name in PARTS.items() if name in symbol), "rest")
            counted[part] += float(share.strip().rstrip("%"))
    total = sum(counted.values())
    found = {part: share / total for part, share in counted.items()}
    weights = round((1 - sparsity) * OUTPUTS * INPUTS)
    gate = 4 * KEY * (OUTPUTS // block[0]) * (INPUTS // block[1])
    return {"block": block, "sparsity": sparsity, **found, "gate_bytes": gate, "open_bytes": weights}


def table(records: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """All records as Markdown."""
    lines = [
        f"# The gate's share of one row, {OUTPUTS}x{INPUTS}, int8, key {KEY}, one thread",
        "",
        ", ".join(f"{key} {value}" for key, value in about.items()),
        "",
        "Shares of samples in the kernels. MB: float32 weights of the gate, and int8 weights of the open blocks.",
        "",
        "| block | closed | scores | selection | product | rest | gate MB | open MB |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for r in records:
        parts = " | ".join(f"{r[part]:.0%}" for part in [*PARTS, "rest"])
        lines.append(
            f"| {r['block'][0]}x{r['block'][1]} | {r['sparsity']:.0%} | {parts} | {r['gate_bytes'] / 1e6:.2f} | "
            f"{r['open_bytes'] / 1e6:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures all, or calls one layer for perf."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--call", nargs=2, type=int, metavar=("OUT", "IN"), help="a block size: only call, for perf")
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of processor time for each")
    options = parser.parse_args()
    if options.call:
        return call(tuple(options.call), options.sparsity, options.seconds)
    about = machine.describe() | {"threads": 1}
    records = [shares(block, sparsity, options.seconds) for block in BLOCKS for sparsity in SPARSITIES]
    text = table(records, about)
    print(text)
    if options.output:
        options.output.with_suffix(".json").write_text(json.dumps({**about, "records": records}, indent=1) + "\n")
        options.output.with_suffix(".md").write_text(text)
    return None


if __name__ == "__main__":
    main()
