"""Whole MLPs of transformers: one gate for all their layers, beside gates of their own and dense int8.

Run from the root of the repository, on an otherwise idle machine:

    python benchmarks/paired_mlp.py --output benchmarks/results/paired-mlp_NAME
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import blockgate as bg
from blockgate.inspect.timing import in_turn, interleave
from blockgate.lab.bench import machine
from blockgate.lab.bench.engines import torch_int8

if TYPE_CHECKING:
    from collections.abc import Callable

# Name, inputs, hidden channels, with a second factor (SwiGLU) or without (GELU).
SHAPES = (
    ("MiniLM", 384, 1536, False),
    ("BERT base", 768, 3072, False),
    ("SmolLM2-135M", 576, 1536, True),
    ("TinyLlama", 2048, 5632, True),
)
ROWS = (1, 16, 128)
INPUTS = 16
FORMATS = ("float32", "bfloat16", "int8", "int4")


class Glu(nn.Module):
    """The MLP of Llama, with names that `sparsify_` knows."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(inputs, hidden, bias=False)
        self.up_proj = nn.Linear(inputs, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, inputs, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """down(silu(gate x) * up x)."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def dense_mlp(inputs: int, hidden: int, glu: bool) -> nn.Module:
    """A fresh MLP inside of a module, which `sparsify_` needs."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, inputs))
    return nn.Sequential(Glu(inputs, hidden) if glu else plain).eval()


def gated(inputs: int, hidden: int, glu: bool, **options: Any) -> nn.Module:
    """The MLP with fresh gates, not packed."""
    model = dense_mlp(inputs, hidden, glu)
    bg.sparsify_(model, filter_fn=lambda *_: True, **options)
    return model.eval()


def arms_of(inputs: int, hidden: int, glu: bool) -> dict[str, nn.Module]:
    """What is compared."""
    shape = (inputs, hidden, glu)
    return {
        "torch fp32": dense_mlp(*shape),
        "torch int8 dynamic": torch_int8(dense_mlp(*shape)),
        "blockgate int8, dense": bg.pack(dense_mlp(*shape), "int8"),
        "int8, own gates, 50% closed": bg.pack(gated(*shape, sparsity=0.5), "int8"),
        "int8, paired, 50% closed": bg.pack(gated(*shape, sparsity=0.5, paired=32), "int8"),
        "int8, paired, 75% closed": bg.pack(gated(*shape, sparsity=0.75, paired=32), "int8"),
    }


def measure(name: str, arms: dict[str, Callable[[Tensor], Any]], inputs: int, rows: int, seconds: float) -> list[Any]:
    """One shape: a record of every arm."""
    given = [torch.randn(rows, inputs) for _ in range(INPUTS)]
    times = interleave({arm: in_turn(given, model) for arm, model in arms.items()}, seconds=seconds)
    return [
        {"shape": name, "rows": rows, "arm": arm, "median": taken.median, "p90": taken.p90}
        for arm, taken in times.items()
    ]


def table(records: list[dict[str, Any]]) -> list[str]:
    """Microseconds, a row for each arm, a column for each number of rows, by shape."""
    rows = list(dict.fromkeys(r["rows"] for r in records))
    heads = [f"{n} row, us" if n == 1 else f"{n} rows, us" for n in rows]
    lines = [
        f"| MLP | packed as | {' | '.join(heads)} |",
        f"|---|---|{'--:|' * len(rows)}",
    ]
    found = {(r["shape"], r["arm"], r["rows"]): f"{r['median'] * 1e6:.0f}" for r in records}
    for shape, arm in dict.fromkeys((r["shape"], r["arm"]) for r in records):
        lines.append(f"| {shape} | {arm} | {' | '.join(found[shape, arm, n] for n in rows)} |")
    return lines


def main() -> None:
    """Measures every shape and writes OUTPUT.json and OUTPUT.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=0.5, help="on each arm of each shape")
    options = parser.parse_args()
    about = machine.describe()
    with torch.inference_mode():
        records = []
        for name, *shape in SHAPES:
            arms = arms_of(*shape)
            for rows in ROWS:
                records += measure(f"{name}, {shape[0]} x {shape[1]}", arms, shape[0], rows, options.seconds)
        packed = {f: bg.pack(gated(768, 3072, False, sparsity=0.5, paired=32), f) for f in FORMATS}
        by_format = [r for n in (1, 16) for r in measure("BERT base", packed, 768, n, options.seconds)]
    text = [
        "# MLPs with one gate",
        "",
        ", ".join(f"{key} {value}" for key, value in about.items()),
        "",
        "Median time of a call, all arms in turns, every call with a new input, gates included. GELU with biases, or "
        "SwiGLU without (SmolLM2, TinyLlama). Own gates: blocks of 256 x 16 for each layer. Paired: blocks of 32 "
        "hidden channels. Fresh gates of kind margin, which open exactly what is asked for.",
        "",
        "## Shapes",
        "",
        *table(records),
        "",
        "## Formats, 50% closed",
        "",
        *table(by_format),
        "",
    ]
    options.output.with_suffix(".md").write_text("\n".join(text))
    everything = {**about, "records": records, "formats": by_format}
    options.output.with_suffix(".json").write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
