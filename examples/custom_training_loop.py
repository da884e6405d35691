"""A training loop of your own: ramp, another learning rate for gates, checkpoints to resume from, gates watched.

    python examples/custom_training_loop.py
    python examples/custom_training_loop.py --stop-after 150   # and again without it: goes on where it stopped

The model predicts the next word of Python's documentation from the eight words before it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor, nn

import blockgate as bg
from blockgate.gates import Gate
from blockgate.lab.data import Vocabulary, load_corpus

WORDS, CONTEXT, CHECK_EVERY = 1000, 8, 50


def make_model(size: int) -> nn.Module:
    """Embeddings of the context side by side, two gated layers, scores of the next word."""
    options = {"block_size": (64, 8), "sparsity": 0.0}
    return nn.Sequential(
        nn.Embedding(WORDS, 64),
        nn.Flatten(),
        bg.DynamicSparseLinear(CONTEXT * 64, size, **options),
        nn.ReLU(),
        bg.DynamicSparseLinear(size, size, **options),
        nn.ReLU(),
        nn.Linear(size, WORDS),
    )


def make_optimizer(model: nn.Module, lr: float, gate_lr: float) -> torch.optim.Optimizer:
    """Adam in two groups: gates that learn more slowly than weights settle later on which blocks they open."""
    of_gates = [p for module in model.modules() if isinstance(module, Gate) for p in module.parameters()]
    known = {id(p) for p in of_gates}
    others = [p for p in model.parameters() if id(p) not in known]
    return torch.optim.Adam([{"params": others, "lr": lr}, {"params": of_gates, "lr": gate_lr}])


def batch_of(text: Tensor, step: int) -> Tensor:
    """Windows (256, CONTEXT + 1), decided by the step: a resumed run sees the batches that it would have seen."""
    windows = text.unfold(0, CONTEXT + 1, 1)
    return windows[torch.randint(len(windows), (256,), generator=torch.Generator().manual_seed(step))]


@torch.no_grad()
def check(model: nn.Module, text: Tensor) -> tuple[float, list[str]]:
    """Perplexity on unseen text, and what looks wrong with the gates."""
    windows = text.unfold(0, CONTEXT + 1, 1)
    model.eval()
    with bg.record_gates(model, coactivation=False) as record:
        loss = nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, -1])
    model.train()
    return float(loss.exp()), record.warnings()


def save(file: Path, **parts: object) -> None:
    """Writes a checkpoint under another name first: whoever is interrupted keeps the old one."""
    part = file.with_suffix(".part")
    torch.save({name: getattr(part_of, "state_dict", lambda p=part_of: p)() for name, part_of in parts.items()}, part)
    os.replace(part, file)


def main(steps: int, size: int, checkpoint: Path, stop_after: int | None) -> None:
    """Trains, from the checkpoint on if there is one."""
    torch.manual_seed(0)
    frequent = load_corpus("python-docs").vocabulary.words[:WORDS]
    corpus = load_corpus("python-docs", vocabulary=Vocabulary(frequent))  # all other words are <unk>
    seen, unseen = corpus.parts["train"], corpus.parts["test"]
    model = make_model(size)
    optimizer = make_optimizer(model, lr=1e-3, gate_lr=3e-4)
    ramp = bg.SparsityRamp(model, final=0.9, begin=steps // 4, end=steps // 2)
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        ramp.load_state_dict(state["ramp"])
        first = state["step"]
        print(f"goes on after step {first}, at sparsity {ramp.sparsity:.2f}")
    for step in range(first + 1, steps + 1):
        windows = batch_of(seen, step)
        loss = nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, -1])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ramp.step()
        if step % CHECK_EVERY == 0 or step == steps:
            perplexity, warnings = check(model, unseen)
            print(f"step {step}: sparsity {ramp.sparsity:.2f}, perplexity {perplexity:.2f}")
            for warning in warnings:
                print(f"  {warning}")
            save(checkpoint, model=model, optimizer=optimizer, ramp=ramp, step=step)
        if step == stop_after:
            return
    print(f"done, at sparsity {model[2].sparsity:.2f}; {checkpoint} holds the model")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--size", type=int, default=512, help="width of the hidden layers")
    parser.add_argument("--checkpoint", type=Path, default=Path("custom_training_loop.pt"))
    parser.add_argument("--stop-after", type=int, help="stop early, as if interrupted")
    main(**vars(parser.parse_args()))
