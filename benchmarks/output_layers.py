"""Three output layers of one small language model, side by side: their quality, and the time of a word.

    python benchmarks/output_layers.py --train dense --weights runs/output-layers
    python benchmarks/output_layers.py --train adaptive --weights runs/output-layers
    python benchmarks/output_layers.py --train gated --weights runs/output-layers
    python benchmarks/output_layers.py --weights runs/output-layers --output benchmarks/results/output-layers

LSTMs of 2 x 256 over the 10,000 words of Penn Treebank, each trained by the same short recipe: with a dense output
layer, an adaptive softmax, and an output layer with gates. The last command packs them and takes the time of the
likeliest next word: run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from blockgate.convert import pack, sparsify_
from blockgate.inspect.timing import carry_on, in_turn, interleave
from blockgate.lab.bench import machine
from blockgate.lab.data import load_corpus
from blockgate.lab.data.batches import cut_columns, equal_segments
from blockgate.lab.models import LanguageModel, LanguageModelConfig
from blockgate.lab.models.language_model import detach
from blockgate.schedule import SparsityRamp

WIDTH, BATCH, STEPS, RATE, WARMUP, SEED = 256, 20, 35, 2e-3, 0.05, 1
CUTOFFS = (1000, 4000)
# Gates read all features through a narrow layer, and sparsity rises late: from and to these shares of the updates.
GATES: Any = {"sparsity": 0.75, "key_size": None, "gate_hidden": 32}
RAMP = (0.4, 0.8)
KINDS = ("dense", "adaptive", "gated")
# Words of the test text that are timed in turn, and that greedy choices are compared on.
TIMED, COMPARED = 64, 2000


def make_model(kind: str, words: int) -> LanguageModel:
    """A fresh model with an output layer of this kind."""
    torch.manual_seed(SEED)
    cutoffs = CUTOFFS if kind == "adaptive" else ()
    size = {"embedding_size": WIDTH, "hidden_size": WIDTH}
    model = LanguageModel(
        LanguageModelConfig(**size, num_layers=2, tied=False, cutoffs=cutoffs, dropout=0.2, locked=False), words
    )
    if kind == "gated":
        sparsify_(model, filter_fn=lambda _, name: name == "softmax.decoder", **GATES)
    return model


def train(kind: str, updates: int, folder: Path) -> None:
    """So many updates with Adam; keeps the weights, and losses on the way, in the folder."""
    corpus = load_corpus("ptb")
    model = make_model(kind, len(corpus.vocabulary)).train()
    inputs, targets = cut_columns(corpus.parts["train"], BATCH, keep_all=False)
    segments = equal_segments(len(inputs), STEPS)[:updates]
    ramp = None
    if kind == "gated":
        begin, end = (int(share * len(segments)) for share in RAMP)
        ramp = SparsityRamp(model, GATES["sparsity"], begin, end)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, foreach=False)
    carried, losses = None, []
    for number, (start, length) in enumerate(track(segments, description=kind)):
        share = (number + 1) / len(segments)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, share / WARMUP) * (1 + math.cos(math.pi * share)) / 2
        found = model.loss(inputs[start : start + length], targets[start : start + length], carried)
        carried = detach(found.carried)
        loss = found.per_word.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if ramp is not None:
            ramp.step()
        losses.append(loss.item())
    folder.mkdir(parents=True, exist_ok=True)
    hundreds = [round(sum(losses[at : at + 100]) / len(losses[at : at + 100]), 4) for at in range(0, len(losses), 100)]
    run = {"seed": SEED, "updates": len(losses), "valid_perplexity": perplexity(model, corpus.parts["valid"])}
    torch.save(model.state_dict(), folder / f"{kind}.pt")
    saved = {**machine.describe(), **run, "training_loss_of_each_hundred": hundreds}
    (folder / f"{kind}.json").write_text(json.dumps(saved, indent=1) + "\n")
    print(kind, run["valid_perplexity"])


@torch.no_grad()
def perplexity(model: Any, text: Tensor) -> float:
    """Of a text, read in ten pieces."""
    model.eval()
    inputs, targets = cut_columns(text, 10, keep_all=True)
    carried, total, count = None, 0.0, 0
    for start, length in equal_segments(len(inputs), STEPS):
        wanted = targets[start : start + length]
        found = model.loss(inputs[start : start + length], wanted, carried)
        carried, total, count = found.carried, total + float(found.per_word.sum()), count + int((wanted >= 0).sum())
    return math.exp(total / count)


def load(kind: str, folder: Path, words: int) -> LanguageModel:
    """The trained model."""
    model = make_model(kind, words)
    model.load_state_dict(torch.load(folder / f"{kind}.pt"))
    return model.eval()


@torch.inference_mode()
def compare(folder: Path, seconds: float | None) -> dict[str, Any]:
    """Every arm's test perplexity, how often its likeliest word is the float32 model's, and times if asked for.

    Quality is kept in the folder for the next time.
    """
    quality = folder / "quality.json"
    known = json.loads(quality.read_text()) if quality.exists() else {}
    corpus = load_corpus("ptb")
    words, test = len(corpus.vocabulary), corpus.parts["test"]
    models = {kind: load(kind, folder, words) for kind in KINDS if (folder / f"{kind}.pt").exists()}
    arms: dict[str, tuple[LanguageModel, Any]] = {
        "dense, int8": (models["dense"], pack(models["dense"], "int8")),
        "dense, screened": (models["dense"], pack(models["dense"], "int8", screened="softmax.decoder")),
        "adaptive softmax, int8": (models["adaptive"], pack(models["adaptive"], "int8")),
    }
    if "gated" in models:
        arms["gated, int8"] = (models["gated"], pack(models["gated"], "int8"))
    rows, calls = [], {}
    line = test[: COMPARED + 1]
    for name, (original, packed) in arms.items():
        states = original._features(line[:-1, None], None)[0].flatten(0, 1)
        expected = original.softmax.likeliest(states, 1)[1]
        found = torch.cat([packed.softmax.likeliest(state, 1)[1] for state in states.split(1)])
        if name not in known:
            known[name] = {"test_perplexity": perplexity(packed, test)}
        rows.append({"arm": name, "same_word": float((found == expected).float().mean()), **known[name]})
        texts = [word.view(1, 1) for word in line[:TIMED]]
        calls[f"{name}: word"] = in_turn(texts, carry_on(_likeliest(packed)))
        calls[f"{name}: output layer"] = in_turn(list(states[:TIMED].split(1)), _output_of(packed))
    quality.write_text(json.dumps(known))
    times = {} if seconds is None else interleave(calls, seconds=seconds)
    for row in rows if times else []:
        row |= {
            f"{part}_us": {"median": 1e6 * timing.median, "p10": 1e6 * timing.p10, "p90": 1e6 * timing.p90}
            for part, timing in (
                ("word", times[f"{row['arm']}: word"]),
                ("output_layer", times[f"{row['arm']}: output layer"]),
            )
        }
    training = {kind: json.loads((folder / f"{kind}.json").read_text()) for kind in models}
    return {**machine.describe(), "width": WIDTH, "words": words, "training": training, "arms": rows}


def _likeliest(model: Any) -> Any:
    def step(word: Tensor, carried: Any) -> Any:
        scores, numbers, carried = model.likeliest(word, carried)
        return (scores, numbers), carried

    return step


def _output_of(model: Any) -> Any:
    return lambda state: model.softmax.likeliest(state, 1)


def markdown(result: dict[str, Any], others: str) -> str:
    """The table."""
    facts = ("cpu", "threads", "instruction set", "blockgate", "commit", "torch")
    lines = [
        f"# Output layers of an LSTM of 2 x {result['width']}, {result['words']} words, trained briefly",
        "",
        "; ".join(f"{fact} {result[fact]}" for fact in facts) + f"; used by other processes {others}.",
        "",
        "`same word`: how often the likeliest word is that of the unpacked model. Times are medians (p10 to p90), in "
        "microseconds, of the likeliest next word: by the whole model, and by its output layer only.",
        "",
        "| output layer | test perplexity | same word | word, us | output layer, us |",
        "|---|--:|--:|--:|--:|",
    ]
    for row in result["arms"]:
        same = f"{row['same_word']:.2%}" if "same_word" in row else "not counted"
        times = " | ".join(
            f"{row[part]['median']:.1f} ({row[part]['p10']:.1f} to {row[part]['p90']:.1f})"
            if part in row
            else "not taken"
            for part in ("word_us", "output_layer_us")
        )
        lines.append(f"| {row['arm']} | {row['test_perplexity']:.1f} | {same} | {times} |")
    lines += ["", "## Unpacked", "", f"After training on {BATCH} x {STEPS} words an update:", ""]
    lines += ["| output layer | seed | updates | valid perplexity |", "|---|--:|--:|--:|"]
    lines += [
        f"| {kind} | {r['seed']} | {r['updates']} | {r['valid_perplexity']:.1f} |"
        for kind, r in result["training"].items()
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Trains one model, or compares those that were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", choices=KINDS, help="which output layer to train with")
    parser.add_argument(
        "--updates", type=int, default=660, help="of training: about half an epoch (default: %(default)s)"
    )
    parser.add_argument("--weights", type=Path, required=True, help="folder where trained models are kept")
    parser.add_argument("--seconds", type=float, default=4.0, help="of time for each call (default: %(default)s)")
    parser.add_argument("--untimed", action="store_true", help="only quality, which is kept with the weights")
    parser.add_argument("--output", type=Path, help="where to write PATH.json and PATH.md")
    options = parser.parse_args()
    if options.train:
        torch.set_num_threads(1)
        return train(options.train, options.updates, options.weights)
    others = machine.Others()
    result = compare(options.weights, None if options.untimed else options.seconds)
    text = markdown(result, str(others))
    print(text)
    if options.output is not None:
        options.output.with_name(options.output.name + ".json").write_text(json.dumps(result, indent=1) + "\n")
        options.output.with_name(options.output.name + ".md").write_text(text)
    return None


if __name__ == "__main__":
    main()
