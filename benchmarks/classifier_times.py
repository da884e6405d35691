"""Times a fine-tuned text classifier with paired gates, packed, beside the dense one in every engine at hand.

From the root of the repository, after examples/finetune_classifier.py has filled the folder:

    python benchmarks/classifier_times.py --model encoder --run folder --output times.json

Texts are random words without padding: what takes time is how many there are. Every arm gets the same ones. "16 tokens"
is one text of 16, and so on; the last is 16 texts of 64. ONNX Runtime is left out where it isn't installed.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

import blockgate as bg
from blockgate.checkpoint.atomic import write_whole
from blockgate.convert.pairs import find_pairs
from blockgate.inspect.timing import in_turn, interleave, using_threads
from blockgate.lab.bench import machine
from blockgate.lab.bench.engines import torch_int8

if TYPE_CHECKING:
    from collections.abc import Callable

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from finetune_classifier import slimmed  # type: ignore[import-not-found]

SIZES = {"1 token": (1, 1), "16 tokens": (1, 16), "64 tokens": (1, 64), "1024 tokens": (16, 64)}
FORMATS = ("int8", "int8a8")
INPUTS = 8


class _Logits(nn.Module):
    """A classifier of words alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Tensor:
        """Logits (N, labels) for words (N, T)."""
        logits: Tensor = self.model(input_ids=words).logits
        return logits


def trained(chosen: argparse.Namespace, start: nn.Module, arm: str) -> nn.Module:
    """An arm as the example left it."""
    model = copy.deepcopy(start)
    state = torch.load(chosen.run / f"{arm}.pt")["model"]
    if arm == "gated":
        in_mlps = {name for pair in find_pairs(model) for name in pair.names.values()}
        bg.sparsify_(model, paired=chosen.block, sparsity=chosen.sparsity, filter_fn=lambda _, name: name in in_mlps)
    if arm == "slim":
        model = slimmed(model, [{"input_ids": torch.arange(8)[None]}], chosen.sparsity)
    model.load_state_dict(state)
    return model.eval()


def onnx_runtime(model: nn.Module, threads: int, *, quantized: bool) -> Callable[[Tensor], Any]:
    """The same model in ONNX Runtime, for words (N, T) of any shape."""
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        axes = {"words": {0: "texts", 1: "tokens"}}
        given = (torch.arange(24).view(2, 12),)
        torch.onnx.export(model, given, file, input_names=["words"], dynamic_axes=axes, dynamo=False, opset_version=17)
        if quantized:
            whole, file = file, Path(folder) / "int8.onnx"
            logging.disable(logging.WARNING)  # it advises a preparation that changes nothing here
            quantize_dynamic(whole, file, weight_type=QuantType.QInt8, per_channel=True)
            logging.disable(logging.NOTSET)
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda words: session.run(None, {"words": words.numpy()})


def arms_of(chosen: argparse.Namespace, threads: int) -> dict[str, Callable[[Tensor], Any]]:
    """What is compared, by name."""
    kind = AutoModelForSequenceClassification
    labels = len(torch.load(chosen.run / "dense.pt")["model"]["classifier.bias"])
    start = kind.from_pretrained(chosen.model, num_labels=labels, dtype=torch.float32, attn_implementation="eager")
    dense = trained(chosen, start, "dense")
    made: dict[str, Callable[[Tensor], Any]] = {
        "torch float32": _Logits(dense),
        "torch int8": _Logits(torch_int8(dense)),
    }
    if importlib.util.find_spec("onnxruntime") is not None:
        made["ONNX Runtime float32"] = onnx_runtime(_Logits(dense), threads, quantized=False)
        made["ONNX Runtime int8"] = onnx_runtime(_Logits(dense), threads, quantized=True)
    for arm in ("dense", "gated", "slim"):
        if (chosen.run / f"{arm}.pt").exists():
            model = trained(chosen, start, arm)
            made |= {f"{arm}, {name}": _Logits(bg.pack(model, name)) for name in FORMATS}
    return made


def main() -> None:
    """Measures and writes one file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder of the encoder, as for the example")
    parser.add_argument("--run", type=Path, required=True, help="its --folder")
    parser.add_argument("--block", type=int, default=64, help="its --block (64)")
    parser.add_argument("--sparsity", type=float, default=0.5, help="its --sparsity (0.5)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads (1 2)")
    parser.add_argument("--seconds", type=float, default=0.7, help="on each arm and size (0.7)")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    found: dict[str, Any] = {"machine": machine.describe(), "milliseconds": {}}
    with torch.inference_mode():
        for threads in chosen.threads:
            with using_threads(threads):
                arms = arms_of(chosen, threads)
                for name, shape in SIZES.items():
                    given = [torch.randint(1000, 30000, shape) for _ in range(INPUTS)]
                    times = interleave({arm: in_turn(given, run) for arm, run in arms.items()}, seconds=chosen.seconds)
                    taken = {arm: {"median": 1e3 * t.median, "p90": 1e3 * t.p90} for arm, t in times.items()}
                    found["milliseconds"].setdefault(f"{threads} threads", {})[name] = taken
                    print(threads, name, {arm: round(t["median"], 3) for arm, t in taken.items()}, flush=True)
    write_whole(chosen.output, json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
