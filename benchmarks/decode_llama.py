"""A decode step of SmolLM2-135M as one compiled graph: dense int8, norm gates at one level, and at allocated levels.

Weights and text are those of benchmarks/norm_gates.py, which says where they come from. From the root:

    python benchmarks/decode_llama.py levels smollm2 --output levels.json
    python benchmarks/decode_llama.py perplexity smollm2 --levels levels.json --output quality.json
    python benchmarks/decode_llama.py time smollm2 --levels levels.json --onnx decode.onnx --output time.json

`LlamaDecoder` runs the model on a cache of 256 places. Its four matrices a layer are gated by single columns, its
output layer is not; everything is packed to int8. `levels` measures what each matrix loses at each level, on text of
the training split, and chooses levels for each budget. `perplexity` reads the test split in pieces of 256 tokens.
`time` compiles each model with torch.compile(fullgraph=True), compares its logits with those of the model as it is, and
times steps of one token at places 32 to 95, the models in turns; "Python between layers": not compiled. With `--onnx`
the dense step is written to that file in int8, unless it is there, and ONNX Runtime is timed too.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockgate as bg
from blockgate.checkpoint.atomic import write_whole
from blockgate.inspect.timing import using_threads
from blockgate.lab.bench import machine
from blockgate.lab.bench.engines import torch_int8
from blockgate.lab.data.sources import locate
from blockgate.lab.models.llama import LlamaDecoder
from blockgate.runtime import PackedColumnLinear, PackedLinear

if TYPE_CHECKING:
    from collections.abc import Iterator

sys.path.insert(0, str(Path(__file__).parent))
from decode_onnx import OnnxDecoder, write_int8  # type: ignore[import-not-found]
from norm_gates import ALL_COLUMNS, load, read  # type: ignore[import-not-found]

PLACES = 256
LEVELS = (0.15, 0.25, 0.35, 0.5)
FORMAT = "int8"


def gated(decoder: nn.Module, sparsities: dict[str, float] | float) -> nn.Module:
    """A copy with norm gates on single columns: all matrices of the layers at one level, or each at its own."""
    made = copy.deepcopy(decoder)
    options: Any = {"head": None}
    if not isinstance(sparsities, float):
        options |= {name: {"sparsity": level} if level else None for name, level in sparsities.items()}
    level = sparsities if isinstance(sparsities, float) else 0.25
    bg.sparsify_(made, gate="norm", block_size=(ALL_COLUMNS, 1), sparsity=level, options=options)
    return made


def arms_of(decoder: nn.Module, levels: Path | None, chosen: list[float], budgets: list[float]) -> dict[str, nn.Module]:
    """The packed models to compare, by name."""
    arms = {"dense": bg.pack(decoder, FORMAT)}
    arms |= {f"{level:.0%} of all": bg.pack(gated(decoder, level), FORMAT) for level in chosen}
    if levels is not None:
        allocations = json.loads(levels.read_text())["allocations"]
        for name in (f"{budget:.0%} allocated" for budget in budgets):
            arms[name] = bg.pack(gated(decoder, allocations[name]["sparsities"]), FORMAT)
    return arms


def loss(decoder: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of the next token, over all tokens but the first."""
    return F.cross_entropy(decoder(*batch)[:-1].float(), batch[0][1:])


@torch.inference_mode()
def perplexity(decoder: nn.Module, tokens: Tensor) -> float:
    """Over all tokens but the first of every piece."""
    places = torch.arange(tokens.shape[1])
    return float(torch.stack([loss(decoder, (piece, places)) for piece in tokens]).mean().exp())


def bytes_of_step(decoder: nn.Module) -> int:
    """What one token reads of int8 weights, padding left out, of scales and of norms: all layers, output layer too."""
    read = 0.0
    for layer in decoder.modules():
        if isinstance(layer, PackedLinear):
            read += layer.in_features * layer.out_features + layer.packed.scale.nbytes
        elif isinstance(layer, PackedColumnLinear):
            whole = layer.in_features * layer.out_features + layer.scale.nbytes
            read += layer.gate.target_density * whole + layer.norms.nbytes
    return round(read)


@torch.inference_mode()
def read_start(decoder: nn.Module, tokens: Tensor) -> nn.Module:
    """The decoder after the first 32 tokens."""
    decoder(tokens[:32], torch.arange(32))
    return decoder


@torch.inference_mode()
def step_times(arms: dict[str, nn.Module], tokens: Tensor, seconds: float) -> dict[str, dict[str, float]]:
    """Milliseconds of one step, the models in turns."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for decoder in arms.values():
        # Another number of threads compiles anew.
        decoder(tokens[32, None], torch.tensor([32]))
    end, step = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        at = 32 + step % 64
        token, place = tokens[at, None], torch.tensor([at])
        for name, decoder in arms.items():
            start = time.perf_counter()
            decoder(token, place)
            times[name].append(time.perf_counter() - start)
        step += 1
    return {
        name: {
            "median": 1000 * statistics.median(found[4:]),
            "fastest tenth": 1000 * statistics.quantiles(found[4:], n=10)[0],
            "steps": len(found) - 4,
        }
        for name, found in times.items()
    }


def find_levels(decoder: nn.Module, tokens: Tensor, budgets: list[float], *, by_loss: bool) -> dict[str, Any]:
    """Levels for each budget."""
    batches = [(piece, torch.arange(len(piece))) for piece in tokens]
    made = gated(decoder, 0.25)
    known = bg.sensitivity(made, batches, levels=LEVELS, loss=loss if by_loss else None, progress=True)
    allocations = {}
    for budget in budgets:
        found = bg.allocate(made, batches, budget, measured=known)
        allocations[f"{budget:.0%} allocated"] = {"saved": found.saved, "sparsities": found.sparsities}
    return {"tokens": tokens.numel(), "sensitivity": known.to_dict(), "allocations": allocations}


@torch.inference_mode()
def find_times(
    decoder: nn.Module, arms: dict[str, nn.Module], tokens: Tensor, chosen: argparse.Namespace
) -> Iterator[tuple[int, Any]]:
    """For each number of threads: times of the compiled models, whose logits are as before, and of others."""
    steps: dict[str, nn.Module] = {}
    for name, made in arms.items():
        want = made(tokens[32:33], torch.tensor([32]))
        start = time.perf_counter()
        steps[name] = torch.compile(made, fullgraph=True)  # type: ignore[assignment]
        # Inputs of integer products are rounded: another order of sums before them moves some to the next step.
        found = steps[name](tokens[32:33], torch.tensor([32]))
        if not (found - want).norm() < 1e-3 * want.norm():
            raise SystemExit(f"{name}: expected the logits of the model that is not compiled, got others.")
        print(f"{name}: compiled in {time.perf_counter() - start:.0f} s", flush=True)
    if chosen.onnx is not None and not chosen.onnx.exists():
        write_int8(decoder, chosen.onnx)
    if not chosen.seconds:
        return
    steps["dense, Python between layers"] = copy.deepcopy(arms["dense"])
    steps["torch float32, Python between layers"] = copy.deepcopy(decoder)
    steps["torch int8, Python between layers"] = torch_int8(decoder)
    for count in chosen.threads:
        if chosen.onnx is not None:
            steps["ONNX Runtime int8"] = OnnxDecoder(decoder, chosen.onnx, count)
        with using_threads(count):
            yield count, step_times(steps, tokens, chosen.seconds)


def main() -> None:
    """Measures and writes one file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["levels", "perplexity", "time"], help="what to measure")
    parser.add_argument("folder", type=Path, help="where the GGUF file lies")
    parser.add_argument("--levels", type=Path, help="what `levels` wrote")
    parser.add_argument("--all", type=float, nargs="*", default=[0.25], help="levels of all matrices alike (0.25)")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.2, 0.25, 0.3], help="to allocate for")
    parser.add_argument("--by-loss", action="store_true", help="levels: 480 passes, not one that compares outputs")
    parser.add_argument("--pieces", type=int, default=8, help="pieces of 256 tokens (8)")
    parser.add_argument("--length", type=int, default=PLACES, help="tokens of a piece (256)")
    parser.add_argument("--seconds", type=float, default=15, help="of timing for each number of threads (15)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads (1 2)")
    parser.add_argument("--onnx", type=Path, help="time: the file of the step for ONNX Runtime")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    chosen = parser.parse_args()
    model, tokenizer = load(chosen.folder)
    decoder = LlamaDecoder(model, PLACES).eval()
    found: dict[str, Any] = {"machine": machine.describe(), "format": FORMAT}
    if chosen.what == "levels":
        text = locate("wikitext-2")["train"].read_text()[: 8 * chosen.pieces * chosen.length]
        ids = tokenizer(text)["input_ids"][: chosen.pieces * chosen.length]
        found |= find_levels(decoder, torch.tensor(ids).view(chosen.pieces, -1), chosen.budgets, by_loss=chosen.by_loss)
    else:
        tokens = read(tokenizer, chosen.pieces, chosen.length)
        arms = arms_of(decoder, chosen.levels, chosen.all, chosen.budgets)
        found["bytes of a step"] = {name: bytes_of_step(made) for name, made in arms.items()}
        if chosen.what == "perplexity":
            found |= {"tokens": tokens.numel(), "perplexity": {}}
            for name, made in arms.items():
                found["perplexity"][name] = perplexity(made, tokens)
                print(f"{name}: {found['perplexity'][name]:.3f}", flush=True)
        else:
            arms = {name: read_start(made, tokens[0]) for name, made in arms.items()}
            read_start(decoder, tokens[0])
            found["milliseconds"] = {}
            for count, times in find_times(decoder, arms, tokens[0], chosen):
                found["milliseconds"][f"{count} threads"] = times
                write_whole(chosen.output, json.dumps(found, indent=2) + "\n")
    write_whole(chosen.output, json.dumps(found, indent=2) + "\n")
    print(json.dumps({name: value for name, value in found.items() if name != "sensitivity"}, indent=2)[:4000])


if __name__ == "__main__":
    main()
