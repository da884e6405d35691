"""Made the files of this folder, run once with blockgate 0.1: checkpoints, packed models, and what they compute."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import blockgate as bg

FOLDER = Path(__file__).parent

# name: the dense model, what `sparsify_` was told, and whether only the gates were saved.
MODELS = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 7)),
        {"gate": "topk", "block_size": (3, 2), "sparsity": 0.5, "key_size": 5, "filter_fn": lambda *_: True},
    ),
    "eq1": (
        lambda: nn.Sequential(nn.Linear(12, 10)),
        {"block_size": 4, "gate": "eq1", "key_size": None, "key_offset": 2, "filter_fn": lambda *_: True},
    ),
    "softmax_sum": (
        lambda: nn.Sequential(nn.Linear(8, 8)),
        {"block_size": 2, "gate": "softmax_sum", "sparsity": 0.75, "filter_fn": lambda *_: True},
    ),
    "lstm": (
        lambda: nn.ModuleDict({"lstm": nn.LSTM(9, 5, num_layers=2)}),
        {"gate": "topk", "block_size": 2, "sparsity": 0.6, "gate_hidden": 3, "filter_fn": lambda *_: True},
    ),
}
PACKED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def inputs() -> dict[str, Tensor]:
    """The input of each model."""
    generator = torch.Generator().manual_seed(7)
    shapes = {"linear": (6, 12), "eq1": (6, 12), "softmax_sum": (6, 8), "lstm": (4, 2, 9)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def run(model: nn.Module, x: Tensor) -> Tensor:
    """What a model computes, in eval mode."""
    with torch.no_grad():
        return model["lstm"](x)[0] if isinstance(model, nn.ModuleDict) else model(x)


def main() -> None:
    for name, (dense, options) in MODELS.items():
        torch.manual_seed(3)
        model = dense()
        bg.sparsify_(model, **options)
        for gate in [m for m in model.modules() if hasattr(m, "reset_near_dense")]:
            gate.reset_parameters()
        model.eval()
        x = inputs()[name]
        bg.save_pretrained(model, FOLDER / name)
        torch.save(run(model, x), FOLDER / name / "expected.pt")
        for short, dtype in PACKED.items():
            packed = bg.pack(model, dtype)
            torch.save({"state": packed.state_dict(), "expected": run(packed, x)}, FOLDER / name / f"packed-{short}.pt")


if __name__ == "__main__":
    sys.exit(main())
