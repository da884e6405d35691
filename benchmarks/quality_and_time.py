"""The picture of README: quality of trained language models, and the time that a token takes in models of their shapes.

Run from the root of the repository, on an otherwise idle machine:

    python benchmarks/quality_and_time.py --output benchmarks/results/quality-and-time_NAME

Perplexities come from the result files in benchmarks/study/laptop, of the float32 weights. Times are of models
with the same configs and fresh weights: margin gates open the same number of blocks for every input, trained or not, so
the work is the same. Pruned weights are zeros, which no dense engine skips; blocks that a static mask closed are not
computed. Every call reads one word, carries the state on, and gives the log-probabilities of all words. The dense model
also runs in torch's own int8, in ONNX Runtime and in OpenVINO, where they are installed. Writes OUTPUT.json and
OUTPUT.md; `python docs/pictures/draw.py` draws them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import blockgate as bg
from blockgate.inspect.timing import carry_on, in_turn, interleave
from blockgate.lab.baselines import to_block_inference
from blockgate.lab.bench import machine
from blockgate.lab.bench.checks import relative_error
from blockgate.lab.bench.engines import engines, without_onednn
from blockgate.lab.bench.report import write_report
from blockgate.lab.models import LanguageModel, count_costs
from blockgate.lab.training.config import run_from_plain

STUDY = Path(__file__).parent / "study" / "laptop"
WORDS = 10_000  # of Penn Treebank
INPUTS = 64

DENSE = "ptb-wide-dense"
# Result folders of the models that are packed to int8.
PACKED = {
    DENSE: "dense",
    "ptb-wide-agp-50": "50% of the weights pruned",
    "ptb-wide-mask-no-dropout-90": "90% of the blocks pruned",
    "ptb-wide-margin-no-dropout-50": "gated, 50% closed",
    "ptb-wide-margin-no-dropout-90": "gated, 90% closed",
}


def result_of(arm: str) -> dict[str, Any]:
    """What the training of an arm left."""
    return json.loads((STUDY / arm / "seed-1.json").read_text())  # type: ignore[no-any-return]


@torch.no_grad()
def fresh_model(arm: str) -> LanguageModel:
    """The model of an arm before training, with as many zeros as it has after."""
    result = result_of(arm)
    run: Any = run_from_plain(result["run"])
    torch.manual_seed(0)
    model = LanguageModel(run.model, WORDS).eval()
    assert count_costs(model).matrix_macs_dense == result["costs"]["matrix_macs_dense"], arm
    for layer in (module for module in model.modules() if isinstance(module, nn.LSTM)):
        for weight in (p for p in layer.parameters() if p.dim() == 2):
            weight.mul_(kept(weight, run.pruning.sparsity, run.pruning.block_size))
    return model


def kept(weight: Tensor, sparsity: float, block: tuple[int, int] | None) -> Tensor:
    """A mask (m, n) with this share of zeros: single ones, or whole blocks."""
    grid = bg.grid.BlockGrid(*weight.shape, block or 1)
    blocks = torch.ones(grid.num_blocks)
    blocks[torch.randperm(grid.num_blocks)[bg.grid.open_blocks(sparsity, grid.num_blocks) :]] = 0
    mask = blocks.view(grid.out_blocks, grid.in_blocks)
    tall = mask.repeat_interleave(grid.block[0], 0)[: weight.shape[0]]
    return tall.repeat_interleave(grid.block[1], 1)[:, : weight.shape[1]]


def ways_of_dense(words: list[Tensor]) -> tuple[dict[str, Any], dict[str, str]]:
    """Calls of the dense model in engines of others, and why the others are left out."""
    model = fresh_model(DENSE)
    calls: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, build in engines(words[0]).items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step = build(model)
                given = torch.as_tensor(step(words[0], None)[0])
        # Engines of others raise what they like; one that can't run here is left out.
        except Exception as failure:
            left_out[name] = str(failure).splitlines()[0]
            continue
        error = relative_error(given.reshape(-1), model(words[0], None)[0].reshape(-1))
        if error > (1e-2 if "fp32" in name else 0.1):
            left_out[name] = f"its outputs differ by {error:.2g} of their norm"
            continue
        calls[name] = in_turn(words, carry_on(step))
    read = calls["torch fp32"]

    def slow_path() -> None:
        with without_onednn():
            read()

    calls["torch fp32, oneDNN off"] = slow_path
    return calls, left_out


def packed(arm: str) -> nn.Module:
    """The fresh model of an arm, packed to int8."""
    model, run = fresh_model(arm), result_of(arm)["run"]
    block = run["pruning"]["block_size"]
    return to_block_inference(model, torch.int8, block_size=tuple(block)) if block else bg.pack(model, "int8")


def measure(seconds: float) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A record for each way: whose quality it has, whether others made the engine, and its times."""
    generator = torch.Generator().manual_seed(0)
    words = [torch.randint(WORDS, (1, 1), generator=generator) for _ in range(INPUTS)]
    with torch.inference_mode():
        calls, left_out = ways_of_dense(words)
        of_others = list(calls)
        arms = dict.fromkeys(calls, DENSE)
        for arm, label in PACKED.items():
            name = f"blockgate int8, {label}"
            calls[name], arms[name] = in_turn(words, carry_on(packed(arm))), arm
        times = interleave(calls, seconds=seconds)
    fastest = min(times[name].median for name in of_others)
    records = [
        {
            "name": name,
            "arm": arm,
            "rival": name in of_others,
            "perplexity": result_of(arm)["test"]["perplexity"],
            "speedup": fastest / times[name].median,
            **asdict(times[name]),
        }
        for name, arm in arms.items()
    ]
    return records, left_out


def table(records: list[dict[str, Any]], left_out: dict[str, str], about: dict[str, Any], command: str) -> str:
    """All records as Markdown."""
    lines = [
        "# Quality and time of LSTM language models of 2 x 768",
        "",
        f"`{command}`",
        "",
        "; ".join(f"{name} {value}" for name, value in about.items()) + ".",
        "",
        "Test perplexity on Penn Treebank after one epoch, seed 1, float32 weights. Time of one word at batch 1, "
        "whole model, in models of the same shapes and densities with fresh weights. Speed-ups are over the fastest "
        "dense engine of others; all ways take turns in one run.",
        "",
        "## One word",
        "",
        "| model | test perplexity | median ms | p10 | p90 | speed-up |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for r in records:
        name = f"{r['name']}, dense" if r["rival"] else r["name"]
        lines.append(
            f"| {name} | {r['perplexity']:.1f} | {r['median'] * 1e3:.3f} | {r['p10'] * 1e3:.3f} | "
            f"{r['p90'] * 1e3:.3f} | {r['speedup']:.2f}x |"
        )
    lines += [f"\nNot measured: {name} ({why})." for name, why in left_out.items()]
    return "\n".join(lines) + "\n"


def main(output: Path, seconds: float, threads: int) -> None:
    """Measures all ways, and writes the report."""
    torch.set_num_threads(threads)
    others, about = machine.Others(), machine.describe()
    records, left_out = measure(seconds)
    about["used by other processes"] = str(others)
    command = shlex.join(["python", "benchmarks/quality_and_time.py", *sys.argv[1:]])
    text = table(records, left_out, about, command)
    write_report(output, text, {"command": command, "machine": about, "left_out": left_out, "results": records})
    print(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1.0, help="to spend on each way")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    main(**vars(parser.parse_args()))
