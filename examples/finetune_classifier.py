"""Fine-tune a text classifier, put paired gates into its MLPs, fine-tune on along a ramp, and time all of it packed.

    python examples/finetune_classifier.py --model folder_with_an_encoder --data train.tsv --test test.tsv --folder run

The first folder is one that transformers loads; the files have a label, a tab and a text on each line. Without them the
example makes a tiny BERT with random weights and texts of random words, to show the way.

Arms are trained one after the other, and all but the first go on from the dense one: "dense"; "gated", whose MLPs get
one gate each; "slim", which loses the same share of hidden channels for good, those that add least; and "dense,
longer", as many updates again. `--folder` keeps what was trained: called again, the example goes on where it stopped.
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

ARMS = ("dense", "gated", "slim", "dense, longer")
SAVE_EVERY = 25


class Texts:
    """Labelled texts as tokens."""

    def __init__(self, rows: list[list[int]], labels: list[int], pad: int) -> None:
        self.rows, self.labels, self.pad = rows, labels, pad

    def batch(self, chosen: list[int]) -> dict[str, Tensor]:
        """These texts, padded to the longest of them."""
        longest = max(len(self.rows[i]) for i in chosen)
        words = torch.tensor([self.rows[i] + [self.pad] * (longest - len(self.rows[i])) for i in chosen])
        labels = torch.tensor([self.labels[i] for i in chosen])
        return {"input_ids": words, "attention_mask": (words != self.pad).long(), "labels": labels}

    def batches(self, size: int) -> list[dict[str, Tensor]]:
        """All texts, those of similar lengths together: so little is padded."""
        order = sorted(range(len(self.rows)), key=lambda i: len(self.rows[i]))
        return [self.batch(order[i : i + size]) for i in range(0, len(order), size)]

    def of_step(self, step: int, size: int) -> dict[str, Tensor]:
        """The batch of a step: each epoch has an order of its own, the same for all arms."""
        epoch, place = divmod(step, max(1, len(self.rows) // size))
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(epoch + 1)).tolist()
        return self.batch(order[place * size : (place + 1) * size])


def load(chosen: argparse.Namespace) -> tuple[nn.Module, Texts, Texts]:
    """The model with a new head, and the texts for training and test."""
    draw = torch.Generator().manual_seed(0)
    if chosen.model is None or chosen.data is None:
        config = BertConfig(vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_labels=4)
        config.intermediate_size, config.max_position_embeddings = 256, chosen.length
        labels = torch.randint(4, (400,), generator=draw).tolist()
        # The words of each label come from its own quarter of the dictionary, half of the time.
        words = torch.randint(8, 200, (len(labels), 12), generator=draw)
        own = torch.rand(words.shape, generator=draw) < 0.5
        rows = torch.where(own, 8 + words % 48 + 48 * torch.tensor(labels)[:, None], words).tolist()
        return BertForSequenceClassification(config), Texts(rows[80:], labels[80:], 0), Texts(rows[:80], labels[:80], 0)
    files = [chosen.data] if chosen.test is None else [chosen.data, chosen.test]
    parts = [[line.split("\t", 1) for line in file.read_text().splitlines() if "\t" in line] for file in files]
    parts[0] = [parts[0][i] for i in torch.randperm(len(parts[0]), generator=draw).tolist()]
    if chosen.test is None:
        # A fifth of the texts is kept for the test.
        parts = [parts[0][len(parts[0]) // 5 :], parts[0][: len(parts[0]) // 5]]
    parts[0] = parts[0][: chosen.texts]
    names = sorted({label for part in parts for label, _ in part})
    tokenizer = AutoTokenizer.from_pretrained(chosen.model)
    texts = []
    for part in parts:
        rows = tokenizer([text for _, text in part], truncation=True, max_length=chosen.length)["input_ids"]
        texts.append(Texts(rows, [names.index(label) for label, _ in part], tokenizer.pad_token_id))
    model = AutoModelForSequenceClassification.from_pretrained(chosen.model, num_labels=len(names), dtype=torch.float32)
    return model, texts[0], texts[1]


def with_gates(dense: nn.Module, inputs: list[dict[str, Tensor]], block: int) -> nn.Module:
    """A copy with one gate for each MLP, fitted to what hidden blocks add on these inputs; all open so far."""
    model = copy.deepcopy(dense)
    shares = [after for _, after in regroup(model, inputs, block=block).values()]
    print(f"the better half of the regrouped blocks holds {sum(shares) / len(shares):.1%} of what they add")
    in_mlps = {name for pair in find_pairs(model) for name in pair.names.values()}
    report = bg.sparsify_(model, paired=block, sparsity=0.0, filter_fn=lambda _, name: name in in_mlps)
    print(f"{len(report.converted)} MLPs paired")
    known = bg.calibrate(model, inputs)
    print(f"gates predict {sum(known.values()) / len(known):.0%} of the variance of what blocks add")
    return model


@torch.no_grad()
def slimmed(dense: nn.Module, inputs: list[dict[str, Tensor]], share: float) -> nn.Module:
    """A copy whose MLPs have lost this share of hidden channels, those that add least on these inputs."""
    model = copy.deepcopy(dense).eval()
    for pair in find_pairs(model):
        sizes: list[Tensor] = []
        see = pair.down.register_forward_pre_hook(
            lambda _, args, sizes=sizes: sizes.append(args[0].flatten(0, -2).abs().mean(0))
        )
        for batch in inputs:
            model(**batch)
        see.remove()
        norms = pair.down.weight.norm(dim=0) * torch.stack(sizes).mean(0)
        kept = norms.topk(round((1 - share) * len(norms))).indices.sort().values
        for layer in pair.layers:
            if layer is pair.down:
                layer.weight, layer.in_features = nn.Parameter(layer.weight[:, kept]), len(kept)
                continue
            layer.weight, layer.out_features = nn.Parameter(layer.weight[kept]), len(kept)
            layer.bias = None if layer.bias is None else nn.Parameter(layer.bias[kept])
    return model


def train(
    model: nn.Module, texts: Texts, steps: int, chosen: argparse.Namespace, file: Path | None, teacher: nn.Module | None
) -> float:
    """Fine-tunes, with gates along a ramp; returns the seconds that it took. Goes on from the file."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    gates = [p for name, p in named if ".gate." in name]
    others = [p for name, p in named if ".gate." not in name]
    groups = [{"params": others, "lr": chosen.lr}, {"params": gates, "lr": chosen.gate_lr}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]])
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    ramp = bg.SparsityRamp(model, chosen.sparsity, begin=0, end=steps // 2) if gates else None
    states: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    states |= {"ramp": ramp} if ramp else {}
    done, seconds, loss = 0, 0.0, torch.zeros(())
    if file is not None and file.exists():
        saved = torch.load(file)
        for name, state in states.items():
            state.load_state_dict(saved[name])
        done, seconds = saved["done"], saved["seconds"]
    model.train()
    begun = time.monotonic() - seconds
    for step in range(done, steps):
        batch = texts.of_step(step, chosen.batch)
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
        if step % SAVE_EVERY == SAVE_EVERY - 1 or step == steps - 1:
            seconds = time.monotonic() - begun
            print(f"  step {step + 1} of {steps}: loss {loss.item():.3f}, {seconds:.0f} s", flush=True)
            if file is not None:
                saved = {name: state.state_dict() for name, state in states.items()}
                torch.save(saved | {"done": step + 1, "seconds": seconds}, file.with_suffix(".new"))
                file.with_suffix(".new").replace(file)
    model.eval()
    return seconds


@torch.inference_mode()
def accuracy(model: nn.Module, texts: Texts) -> float:
    """Of the texts that were kept for the test."""
    right = 0
    for batch in texts.batches(64):
        labels = batch.pop("labels")
        right += int((model(**batch).logits.argmax(-1) == labels).sum())
    return right / len(texts.rows)


@torch.inference_mode()
def times(models: dict[str, nn.Module], texts: Texts, rounds: int) -> dict[str, float]:
    """Milliseconds of one text at a time, the median, all models in turns."""
    found: dict[str, list[float]] = {name: [] for name in models}
    for i in range(rounds):
        batch = texts.batch([i % len(texts.rows)])
        del batch["labels"]
        for name, model in models.items():
            begun = time.perf_counter()
            model(**batch)
            found[name].append(1000 * (time.perf_counter() - begun))
    return {name: sorted(taken)[len(taken) // 2] for name, taken in found.items()}


def main() -> None:
    """All arms, their accuracy and their times."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="folder of an encoder; a tiny random one if left out")
    parser.add_argument("--data", type=Path, help="lines of label, tab, text; random ones if left out")
    parser.add_argument("--test", type=Path, help="the same for the test; a fifth of the texts if left out")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["dense", "gated"], help="what to train")
    parser.add_argument("--sparsity", type=float, default=0.5, help="of the hidden blocks of every MLP (0.5)")
    parser.add_argument("--block", type=int, default=32, help="hidden channels of a block (32)")
    parser.add_argument("--length", type=int, default=64, help="tokens of a text, at most (64)")
    parser.add_argument("--texts", type=int, default=20000, help="texts for training, at most (20000)")
    parser.add_argument("--epochs", type=int, default=3, help="of each arm (3)")
    parser.add_argument("--steps", type=int, default=10**9, help="of each arm, at most")
    parser.add_argument("--more-steps", type=int, help="of each arm but the first, in place of --steps and --epochs")
    parser.add_argument("--batch", type=int, default=32, help="texts of a step (32)")
    parser.add_argument("--lr", type=float, default=5e-5, help="of the weights (5e-5)")
    parser.add_argument("--gate-lr", type=float, default=2e-4, help="of the gates (2e-4)")
    parser.add_argument("--dropout", type=float, help="in place of the model's own")
    parser.add_argument("--freeze-embeddings", action="store_true", help="leave them as they are")
    parser.add_argument("--distil", action="store_true", help="let the gated arm learn from the dense one too")
    parser.add_argument("--rounds", type=int, default=100, help="calls that are timed (100)")
    parser.add_argument("--folder", type=Path, help="where arms are kept, so that a stopped run goes on")
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    start, texts, kept = load(chosen)
    for module in start.modules():
        if isinstance(module, nn.Dropout) and chosen.dropout is not None:
            module.p = chosen.dropout
        if isinstance(module, nn.Embedding) and chosen.freeze_embeddings:
            module.requires_grad_(False)
    steps = min(chosen.steps, chosen.epochs * (len(texts.rows) // chosen.batch))
    inputs = [{**texts.of_step(i, 32)} for i in range(8)]
    for batch in inputs:
        del batch["labels"]
    found: dict[str, Any] = {}
    models: dict[str, nn.Module] = {}
    for name in ["dense", *(arm for arm in chosen.arms if arm != "dense")]:
        dense = models.get("dense", start)
        steps = chosen.more_steps or steps if models else steps
        if name == "gated":
            model = with_gates(dense, inputs, chosen.block)
        else:
            model = slimmed(dense, inputs, chosen.sparsity) if name == "slim" else copy.deepcopy(dense)
        if chosen.folder is not None:
            chosen.folder.mkdir(parents=True, exist_ok=True)
        file = None if chosen.folder is None else chosen.folder / f"{name.replace(', ', '-')}.pt"
        seconds = train(model, texts, steps, chosen, file, dense if chosen.distil and name == "gated" else None)
        models[name] = model
        found[name] = {"accuracy": accuracy(model, kept), "steps": steps, "seconds": seconds}
        print(f"{name}: accuracy {found[name]['accuracy']:.1%} after {steps} steps, {seconds:.0f} s", flush=True)
    packed = {f"{name}, int8": bg.pack(model, "int8") for name, model in models.items() if name != "dense, longer"}
    for name, taken in times({"dense": models["dense"], **packed}, kept, chosen.rounds).items():
        found.setdefault(name, {})["milliseconds"] = taken
        if name in packed:
            found[name]["accuracy"] = accuracy(packed[name], kept)
        print(f"{name}: {taken:.2f} ms a text, accuracy {found[name]['accuracy']:.1%}")
    if chosen.output:
        used_options = {key: str(value) for key, value in vars(chosen).items() if key != "output"}
        chosen.output.write_text(json.dumps({"options": used_options, "arms": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
