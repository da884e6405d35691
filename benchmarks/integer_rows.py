"""Integer products of many rows: speed beside error, ours and those of torch and ONNX Runtime.

Run from the root of the repository, on an otherwise idle machine:

    python benchmarks/integer_rows.py --output benchmarks/results/integer-rows_NAME
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import blockgate as bg
from blockgate.inspect.timing import interleave
from blockgate.lab.bench import machine
from blockgate.lab.bench.engines import torch_int8, without_onednn

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = ((768, 3072), (1024, 4096))
ROWS = (16, 64, 128, 256, 1024)
INPUTS = 8
GATED = (0.5, 0.75)


def onnxruntime_int8(layer: nn.Linear, example: Tensor) -> Callable[[Tensor], Any]:
    """The layer with int8 weights and dynamic 8-bit inputs in ONNX Runtime, on as many threads as torch has."""
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layer.onnx"
        with without_onednn():
            torch.onnx.export(
                layer,
                (example,),
                path,
                input_names=["x"],
                output_names=["y"],
                dynamic_axes={"x": {0: "rows"}, "y": {0: "rows"}},
                dynamo=False,
            )
        quantize_dynamic(path, path.with_name("int8.onnx"), weight_type=QuantType.QInt8)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(path.with_name("int8.onnx"), options, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


def gated(layer: nn.Linear, sparsity: float) -> nn.Module:
    """The layer with fresh gates over blocks of 128, packed to int8a8."""
    made = bg.DynamicSparseLinear.from_dense(layer, block_size=128, key_size=128, sparsity=sparsity)
    return bg.pack(made.eval(), "int8a8")


def error(product: Callable[[Tensor], Tensor], layer: nn.Linear, inputs: Tensor) -> float:
    """Norm of the difference to the product in float64, as a share of that product's norm."""
    want = torch.nn.functional.linear(inputs.double(), layer.weight.double(), layer.bias.double())
    return float((product(inputs) - want).norm() / want.norm())


def measure(outputs: int, inputs: int, rows: int, seconds: float) -> list[dict[str, Any]]:
    """One shape: a record of every arm."""
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs).eval()
    given = [torch.randn(rows, inputs) for _ in range(INPUTS)]
    arms: dict[str, Callable[[Tensor], Tensor]] = {
        "torch fp32": layer,
        "torch int8 dynamic": torch_int8(nn.Sequential(layer)),
        "ONNX Runtime int8": onnxruntime_int8(layer, given[0]),
        "blockgate int8": bg.pack(layer, "int8"),
        "blockgate int8a8": bg.pack(layer, "int8a8"),
    }
    normal, positive = torch.randn(256, inputs), nn.functional.relu(torch.randn(256, inputs))
    errors = {name: [error(run, layer, x) for x in (normal, positive)] for name, run in arms.items()}
    arms |= {f"blockgate int8a8, {sparsity:.0%} closed": gated(layer, sparsity) for sparsity in GATED}
    turn = dict.fromkeys(arms, 0)

    def call(name: str) -> Callable[[], Tensor]:
        def run() -> Tensor:
            turn[name] += 1
            return arms[name](given[turn[name] % INPUTS])

        return run

    times = interleave({name: call(name) for name in arms}, seconds=seconds)
    return [
        {
            "outputs": outputs,
            "inputs": inputs,
            "rows": rows,
            "arm": name,
            "median": times[name].median,
            "p90": times[name].p90,
            "torch int8 over this": times["torch int8 dynamic"].median / times[name].median,
            "ONNX Runtime int8 over this": times["ONNX Runtime int8"].median / times[name].median,
            "error, normal inputs": errors[name][0] if name in errors else None,
            "error, positive inputs": errors[name][1] if name in errors else None,
        }
        for name in arms
    ]


def table(records: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """All records as Markdown."""
    lines = [
        "# Integer products of many rows",
        "",
        ", ".join(f"{key} {value}" for key, value in about.items()),
        "",
        "Dense layers unless blocks are closed (blocks of 128, key 128, gate included). Error: norm of the difference "
        "to the product in float64 as a share of that product's norm, for normal inputs and for positive ones (ReLU).",
        "",
        "| outputs x inputs | rows | arm | median, ms | speed, torch int8 = 1 | speed, ONNX Runtime int8 = 1 | "
        "error, normal | error, positive |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for r in records:
        errors = [r["error, normal inputs"], r["error, positive inputs"]]
        shown = " | ".join("" if e is None else f"{e:.2%}" for e in errors)
        lines.append(
            f"| {r['outputs']}x{r['inputs']} | {r['rows']} | {r['arm']} | {r['median'] * 1e3:.3f} | "
            f"{r['torch int8 over this']:.2f} | {r['ONNX Runtime int8 over this']:.2f} | {shown} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures every shape and writes OUTPUT.json and OUTPUT.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=0.5, help="on each arm of each shape")
    options = parser.parse_args()
    about = machine.describe()
    with torch.inference_mode():
        records = [r for o, i in SHAPES for rows in ROWS for r in measure(o, i, rows, options.seconds)]
    options.output.with_suffix(".json").write_text(json.dumps({**about, "records": records}, indent=1) + "\n")
    options.output.with_suffix(".md").write_text(table(records, about))


if __name__ == "__main__":
    main()
