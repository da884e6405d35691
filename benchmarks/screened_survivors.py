"""How many words survive the scan of a screened output layer, on trained language models, and for which codes.

    blockgate train ptb-lstm-laptop --output runs/small --epochs 1 --model.matrices dense --model.embedding-size 256 \
        --model.hidden-size 256 --model.no-projection --model.cutoffs --model.dropout 0.2
    python benchmarks/screened_survivors.py runs/small --output benchmarks/results/screened-survivors-256
    python benchmarks/screened_survivors.py --updates 120 --output benchmarks/results/screened-survivors-1536

The second trains a dense model of 2 x 1536 itself, briefly: so many updates, saved to --weights if given, from where
training goes on the next time. Counts are of words of the test text, each with the state of all words before it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from blockgate.convert import pack
from blockgate.lab.bench import machine
from blockgate.lab.data import load_corpus
from blockgate.lab.models import LanguageModel, LanguageModelConfig
from blockgate.lab.models.language_model import detach
from blockgate.lab.training import load_trained

BATCH, STEPS = 16, 24
WARMUP = 50
KS = (1, 10, 40)
# Bits of a code and inputs that share a step; 0: all of a row.
CHOICES = ((3, 16), (3, 32), (4, 32), (4, 64), (4, 128), (4, 0), (5, 64), (5, 0))
STEP_BITS = 8
SHARES = (1.0, 0.92, 0.84, 0.76)


def train_briefly(model: LanguageModel, text: Tensor, updates: int, weights: Path | None) -> int:
    """Adam at 1e-3 over segments of the text (T,); returns how many updates the model has had in all."""
    columns = text[: len(text) // BATCH * BATCH].view(BATCH, -1).t().contiguous()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    done = 0
    if weights is not None and weights.exists():
        saved = torch.load(weights)
        model.load_state_dict(saved["m"])
        optimizer.load_state_dict(saved["o"])
        done = saved["step"]
    carried = None
    for step in track(range(done, updates), description="training"):
        first = step * STEPS % (len(columns) - STEPS - 1)
        words, targets = columns[first : first + STEPS], columns[first + 1 : first + STEPS + 1]
        losses = model.loss(words, targets, carried)
        carried = detach(losses.carried)
        optimizer.zero_grad()
        losses.per_word.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / WARMUP)
        optimizer.step()
    if weights is not None and updates > done:
        torch.save({"m": model.state_dict(), "o": optimizer.state_dict(), "step": updates}, weights)
    return max(done, updates)


@torch.no_grad()
def count(model: LanguageModel, text: Tensor, tokens: int) -> dict[str, Any]:
    """Survivors of our layer and of other codes, on the first `tokens` words of a text."""
    words, targets = text[:tokens, None], text[1 : tokens + 1]
    packed: Any = pack(model.eval(), screened="softmax.decoder")
    states = packed._features(words, None)[0].flatten(0, 1)
    layer = packed.softmax.decoder
    loss = torch.nn.functional.cross_entropy(layer(states), targets)
    counts = {k: layer.count_survivors(states, k) for k in KS}
    weight, chosen = layer.weight, states[:: max(1, tokens // 300)]
    return {
        "perplexity": float(loss.exp()),
        "words": len(weight),
        "features": weight.shape[1],
        "tokens": tokens,
        "scanned_bytes": layer.scanned_bytes,
        "int8_bytes": weight.numel(),
        "float32_bytes": 4 * weight.numel(),
        "survivors": {str(k): summary(found) for k, found in counts.items()},
        "other_codes": [
            {"bits": bits, "group": group or weight.shape[1], **count_codes(weight, layer.bias, chosen, bits, group)}
            for bits, group in track(CHOICES, description="codes")
        ],
    }


def count_codes(weight: Tensor, bias: Tensor, states: Tensor, bits: int, group: int) -> dict[str, Any]:
    """Survivors with codes of so many bits, by the same bound in float64, inputs unrounded."""
    rows, x = weight.double(), states.double()
    groups = rows.unflatten(1, (-1, group or rows.shape[1]))
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    peak = groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30)
    held, least = torch.zeros_like(groups), torch.full_like(peak, torch.inf)
    for share in SHARES:
        step = share * peak / (highest + 0.5)
        tried = (groups / step).round().clamp(lowest, highest) * step
        missed = (groups - tried).square().sum(dim=-1, keepdim=True)
        held = torch.where(missed < least, tried, held)
        least = torch.minimum(missed, least)
    held = held.flatten(1)
    scores = x @ held.t() + bias.double()
    errors = x.norm(dim=1, keepdim=True) * (rows - held).norm(dim=1)
    found = {}
    for k in KS:
        threshold = (scores - errors).topk(k).values[:, -1:]
        found[str(k)] = summary(((scores + errors) >= threshold).sum(dim=1))
    return {"bits_of_a_weight": bits + STEP_BITS / (group or rows.shape[1]), "survivors": found}


def summary(counts: Tensor) -> dict[str, int]:
    """Median and tail of counts."""
    ordered = counts.double()
    return {
        "median": round(float(ordered.median())),
        "p95": round(float(ordered.quantile(0.95))),
        "max": int(ordered.max()),
    }


def markdown(result: dict[str, Any]) -> str:
    """The tables."""
    lines = [
        f"# Survivors of the scan: {result['words']} words, {result['features']} features",
        "",
        f"{result['model']}; perplexity {result['perplexity']:.0f} on the {result['tokens']} words that were counted.",
        f"The scan reads {result['scanned_bytes'] / 1e6:.2f} MB; the weight has {result['int8_bytes'] / 1e6:.2f} MB in "
        f"int8 and {result['float32_bytes'] / 1e6:.2f} MB in float32, of which a survivor reads one row.",
        "",
        "Scores computed for the top k, median (95th percentile, most):",
        "",
        "| codes | bits of a weight | " + " | ".join(f"k = {k}" for k in KS) + " |",
        "|---|--:|" + "--:|" * len(KS),
        f"| **as built: 4 bits, groups of 32** | 4.25 | {cells(result['survivors'])} |",
    ]
    for codes in result["other_codes"]:
        name = f"{codes['bits']} bits, groups of {codes['group']}"
        lines.append(f"| {name} | {codes['bits_of_a_weight']:.2f} | {cells(codes['survivors'])} |")
    return "\n".join(lines) + "\n"


def cells(survivors: dict[str, dict[str, int]]) -> str:
    """One row's counts."""
    return " | ".join(f"{s['median']} ({s['p95']}, {s['max']})" for s in survivors.values())


def main() -> None:
    """Trains if asked, counts, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, help="folder of a trained language model")
    parser.add_argument("--width", type=int, default=1536, help="of a model trained here (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=120, help="of that model (default: %(default)s)")
    parser.add_argument("--weights", type=Path, help="where that model is kept")
    parser.add_argument("--tokens", type=int, default=2000, help="that are counted (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="where to write PATH.json and PATH.md")
    options = parser.parse_args()
    corpus = load_corpus("ptb")
    if options.run is not None:
        trained: Any = load_trained(options.run)
        model, described = trained.model, f"{options.run.name}, trained by `blockgate train`"
    else:
        torch.manual_seed(0)
        size = {"embedding_size": options.width, "hidden_size": options.width}
        model = LanguageModel(LanguageModelConfig(**size, num_layers=2, tied=False), len(corpus.vocabulary))
        updates = train_briefly(model, corpus.parts["train"], options.updates, options.weights)
        described = f"An LSTM of 2 x {options.width} after {updates} updates of {BATCH} x {STEPS} words"
    result = {**machine.describe(), "model": described} | count(model, corpus.parts["test"], options.tokens)
    text = markdown(result)
    print(text)
    if options.output is not None:
        options.output.with_name(options.output.name + ".json").write_text(json.dumps(result, indent=1) + "\n")
        options.output.with_name(options.output.name + ".md").write_text(text)


if __name__ == "__main__":
    main()
