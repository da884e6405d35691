"""Fine-tune a text classifier whose MLPs have paired gates, with a dense one beside it, and time both packed.

    python examples/finetune_classifier.py --model folder_with_an_encoder --data labelled.tsv --minutes 60

The folder is one that transformers loads; the file has a label, a tab and a text on each line. Without them the example
makes a tiny BERT with random weights and texts of random words, to show the way.

The dense arm is trained first. With --distil the gated arm learns from its answers too.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

import blockgate as bg
from blockgate.convert import regroup
from blockgate.convert.pairs import find_pairs
from blockgate.integrations.distil import distil_loss


class Texts:
    """Labelled texts as tokens; a fifth of them is kept for the test."""

    def __init__(self, rows: list[list[int]], labels: list[int], pad: int) -> None:
        self.rows, self.labels, self.pad = rows, labels, pad
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
        self.test, self.train = order[: len(order) // 5], order[len(order) // 5 :]

    def batch(self, chosen: list[int]) -> dict[str, Tensor]:
        """These texts, padded to the longest of them."""
        longest = max(len(self.rows[i]) for i in chosen)
        words = torch.tensor([self.rows[i] + [self.pad] * (longest - len(self.rows[i])) for i in chosen])
        labels = torch.tensor([self.labels[i] for i in chosen])
        return {"input_ids": words, "attention_mask": (words != self.pad).long(), "labels": labels}

    def batches(self, chosen: list[int], size: int) -> list[dict[str, Tensor]]:
        """All of these texts."""
        return [self.batch(chosen[i : i + size]) for i in range(0, len(chosen), size)]


def load(folder: str | None, data: Path | None, length: int, most: int) -> tuple[nn.Module, Texts]:
    """The model with a new head, and the texts."""
    if folder is None or data is None:
        config = BertConfig(vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_labels=4)
        config.intermediate_size, config.max_position_embeddings = 256, length
        draw = torch.Generator().manual_seed(0)
        labels = torch.randint(4, (min(most, 400),), generator=draw).tolist()
        # The words of each label come from its own quarter of the dictionary, half of the time.
        words = torch.randint(8, 200, (len(labels), 12), generator=draw)
        own = torch.rand(words.shape, generator=draw) < 0.5
        words = torch.where(own, 8 + words % 48 + 48 * torch.tensor(labels)[:, None], words)
        return BertForSequenceClassification(config), Texts(words.tolist(), labels, 0)
    lines = [line.split("\t", 1) for line in data.read_text().splitlines() if "\t" in line]
    some = torch.randperm(len(lines), generator=torch.Generator().manual_seed(0))[:most].tolist()
    names = sorted({lines[i][0] for i in some})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = tokenizer([lines[i][1] for i in some], truncation=True, max_length=length)["input_ids"]
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(names), dtype=torch.float32)
    return model, Texts(rows, [names.index(lines[i][0]) for i in some], tokenizer.pad_token_id)


def train(model: nn.Module, texts: Texts, chosen: argparse.Namespace, teacher: nn.Module | None = None) -> int:
    """Fine-tunes until time or epochs are up; with gates along a ramp. Returns the number of steps."""
    draw = torch.Generator().manual_seed(1)
    gates = [p for name, p in model.named_parameters() if ".gate." in name]
    others = [p for name, p in model.named_parameters() if ".gate." not in name]
    groups = [{"params": others, "lr": chosen.lr}, {"params": gates, "lr": chosen.gate_lr}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]])
    steps = min(chosen.steps, chosen.epochs * (len(texts.train) // chosen.batch))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    ramp = bg.SparsityRamp(model, chosen.sparsity, begin=0, end=steps // 2) if gates else None
    begun, order = time.monotonic(), []
    model.train()
    for done in range(1, steps + 1):
        if len(order) < chosen.batch:
            order = [texts.train[i] for i in torch.randperm(len(texts.train), generator=draw).tolist()]
        batch = texts.batch([order.pop() for _ in range(chosen.batch)])
        output = model(**batch)
        loss = output.loss
        if teacher is not None:
            with torch.no_grad():
                known = teacher(**batch)
            loss = loss + distil_loss(output.logits, known.logits, "logits", temperature=2.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if ramp is not None:
            ramp.step()
        if done % 50 == 0:
            print(f"  step {done} of {steps}: loss {float(loss):.3f}, {time.monotonic() - begun:.0f} s", flush=True)
        if chosen.minutes and time.monotonic() - begun > 60 * chosen.minutes:
            raise SystemExit(f"stopped after {done} of {steps} steps: pass fewer --steps, or more --minutes")
    model.eval()
    return steps


@torch.inference_mode()
def accuracy(model: nn.Module, texts: Texts) -> float:
    """Of the texts that were kept for the test."""
    right = 0
    for batch in texts.batches(texts.test, 64):
        labels = batch.pop("labels")
        right += int((model(**batch).logits.argmax(-1) == labels).sum())
    return right / len(texts.test)


@torch.inference_mode()
def times(models: dict[str, nn.Module], texts: Texts, rounds: int) -> dict[str, float]:
    """Milliseconds of one text at a time, the median, all models in turns."""
    found: dict[str, list[float]] = {name: [] for name in models}
    for i in range(rounds):
        batch = texts.batch([texts.test[i % len(texts.test)]])
        del batch["labels"]
        for name, model in models.items():
            begun = time.perf_counter()
            model(**batch)
            found[name].append(1000 * (time.perf_counter() - begun))
    return {name: sorted(taken)[len(taken) // 2] for name, taken in found.items()}


def main() -> None:
    """Both arms, their accuracy and their times."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="folder of an encoder; a tiny random one if left out")
    parser.add_argument("--data", type=Path, help="lines of label, tab, text; random ones if left out")
    parser.add_argument("--sparsity", type=float, default=0.5, help="of the hidden blocks of every MLP (0.5)")
    parser.add_argument("--block", type=int, default=32, help="hidden channels of a block (32)")
    parser.add_argument("--length", type=int, default=64, help="tokens of a text, at most (64)")
    parser.add_argument("--texts", type=int, default=20000, help="texts, at most (20000)")
    parser.add_argument("--epochs", type=int, default=3, help="of each arm (3)")
    parser.add_argument("--steps", type=int, default=10**9, help="of each arm, at most")
    parser.add_argument("--batch", type=int, default=32, help="texts of a step (32)")
    parser.add_argument("--lr", type=float, default=5e-5, help="of the weights (5e-5)")
    parser.add_argument("--gate-lr", type=float, default=2e-4, help="of the gates (2e-4)")
    parser.add_argument("--distil", action="store_true", help="let the gated arm learn from the dense one too")
    parser.add_argument("--minutes", type=float, default=0, help="give up after so many for one arm (0: never)")
    parser.add_argument("--rounds", type=int, default=100, help="calls that are timed (100)")
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    dense, texts = load(chosen.model, chosen.data, chosen.length, chosen.texts)
    gated = copy.deepcopy(dense)
    inputs = [texts.batch(texts.train[i : i + 32]) for i in range(0, 256, 32)]
    shares = [after for _, after in regroup(gated, inputs, block=chosen.block).values()]
    print(f"the better half of the regrouped blocks holds {sum(shares) / len(shares):.1%} of what they add")
    in_mlps = {name for pair in find_pairs(gated) for name in pair.names.values()}
    report = bg.sparsify_(gated, paired=chosen.block, filter_fn=lambda _, name: name in in_mlps)
    print(f"{len(report.converted)} MLPs paired")
    found: dict[str, Any] = {}
    for name, model, teacher in (("dense", dense, None), ("gated", gated, dense if chosen.distil else None)):
        begun = time.monotonic()
        steps = train(model, texts, chosen, teacher)
        found[name] = {"accuracy": accuracy(model, texts), "steps": steps, "seconds": time.monotonic() - begun}
        print(f"{name}: accuracy {found[name]['accuracy']:.1%} after {steps} steps, {found[name]['seconds']:.0f} s")
    packed = {name: bg.pack(model, "int8") for name, model in (("dense", dense), ("gated", gated))}
    for name, taken in times({"dense float32": dense, **packed}, texts, chosen.rounds).items():
        found.setdefault(name, {})["milliseconds"] = taken
        after = f", accuracy {accuracy(packed[name], texts):.1%}" if name in packed else ""
        print(f"{name}{' int8' if name in packed else ''}: {taken:.2f} ms a text{after}")
    if chosen.output:
        used_options = {key: str(value) for key, value in vars(chosen).items() if key != "output"}
        chosen.output.write_text(json.dumps({"options": used_options, "arms": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
