"""How near a gated sentence encoder comes to the dense one without labels: fresh, calibrated, solved, reconstructed.

From the root of the repository, with what benchmarks/sentence_encoder.py needs:

    python benchmarks/calibrate_encoder.py --output calibrate.json

Every matrix of MiniLM-L6 is gated, with the layouts and kinds of ARMS. "Solved" is `reconstruct` with no steps: the
closed form only. Sentences for calibration are from the training split of WikiText-2, those it is judged by from its
test split. What is compared is the mean over tokens, scaled to length 1: the cosine to that of the dense encoder, on
average. Arms that the output file has already are not run again.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import blockgate as bg
from blockgate.checkpoint.atomic import write_whole
from blockgate.convert import reconstruct
from blockgate.lab.bench import machine

sys.path.insert(0, str(Path(__file__).parent))
from sentence_encoder import PACKAGE, encode, load_encoder, padded, read_sentences  # type: ignore[import-not-found]

TRAINED = {"gate": "topk", "normalise": "none", "key_size": None}
ARMS: dict[str, dict[str, Any]] = {
    "topk, 32 x 32": {**TRAINED, "block_size": 32},
    "topk, 256 x 4": {**TRAINED, "block_size": (256, 4)},
    "norm, 32 x 32": {"gate": "norm", "block_size": 32},
    "norm, 256 x 4": {"gate": "norm", "block_size": (256, 4)},
    "norm, single columns": {"gate": "norm", "block_size": (4096, 1)},
}


@torch.no_grad()
def cosine(student: nn.Module, teacher: nn.Module, batches: list[Any]) -> float:
    """The mean cosine of embeddings over all sentences."""
    found = [(encode(student, *b)[0] * encode(teacher, *b)[0]).sum(-1) for b in batches]
    return float(torch.cat(found).mean())


def judge(teacher: nn.Module, options: dict[str, Any], inputs: list[Any], judged: list[Any], chosen: Any) -> Any:
    """One arm: the cosine after each step, and the seconds that they took."""
    student = copy.deepcopy(teacher).requires_grad_(True)
    bg.sparsify_(student, filter_fn=lambda *_: True, sparsity=chosen.sparsity, **options)
    student.eval()
    arm: dict[str, Any] = {"fresh": cosine(student, teacher, judged)}
    start = time.perf_counter()
    if options["gate"] != "norm":
        shares = bg.calibrate(student, inputs)
        arm["predicted"] = sum(shares.values()) / len(shares)
        arm["calibrated"] = cosine(student, teacher, judged)
    if chosen.quick:
        return arm | {"seconds": time.perf_counter() - start}
    left = reconstruct(student, teacher, inputs, steps=0, ridge=chosen.ridge)
    arm["error left in layers"] = sum(left.values()) / len(left)
    arm["solved"] = cosine(student, teacher, judged)
    if chosen.steps:
        reconstruct(student, teacher, inputs, steps=chosen.steps, lr=chosen.lr, ridge=None)
        arm["reconstructed"] = cosine(student, teacher, judged)
    return arm | {"seconds": time.perf_counter() - start}


def main() -> None:
    """Measures and writes one file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sparsity", type=float, default=0.25, help="of all matrices (0.25)")
    parser.add_argument("--sentences", type=int, default=512, help="of 16 tokens, for calibration (512)")
    parser.add_argument("--steps", type=int, default=0, help="of reconstruction after the closed form (0)")
    parser.add_argument("--lr", type=float, default=3e-4, help="of these steps (3e-4)")
    parser.add_argument("--ridge", type=float, default=1e-2, help="of the closed form (1e-2)")
    parser.add_argument("--quick", action="store_true", help="fresh and calibrated only: a minute or two")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="which to run (all)")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    teacher, tokenizer = load_encoder(PACKAGE)
    rows = read_sentences("wikitext-2", "train", tokenizer)
    # One length a batch: padded places are no data.
    rows = [row[:16] for row in rows if len(row) >= 16][: chosen.sentences]
    batches = [padded(rows[i : i + 64], tokenizer.pad_token_id) for i in range(0, len(rows), 64)]
    held_out = read_sentences("wikitext-2", "test", tokenizer)[:128]
    judged = [padded(held_out[i : i + 32], tokenizer.pad_token_id) for i in range(0, len(held_out), 32)]
    inputs = [{"input_ids": ids, "attention_mask": mask} for ids, mask in batches]
    found: dict[str, Any] = json.loads(chosen.output.read_text()) if chosen.output.exists() else {}
    found |= {"machine": machine.describe(), "sparsity": chosen.sparsity, "sentences": len(rows)}
    found |= {"tokens": sum(map(len, rows)), "ridge": chosen.ridge, "steps": chosen.steps}
    for name in chosen.arms:
        if name not in found:
            found[name] = judge(teacher, ARMS[name], inputs, judged, chosen)
            print(name, found[name], flush=True)
            write_whole(chosen.output, json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
