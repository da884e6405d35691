"""Gate a language model without any training: choose a level for each layer, pack it, time a decode step.

    python examples/decode_without_training.py --model folder_with_a_llama --text some_text.txt --compile

The folder is one of a Llama-style model that transformers loads; with --gguf it is the GGUF file of that name in it.
Without a folder the example makes a small model with random weights, to show the way; what it says of quality then
means nothing.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import blockgate as bg
from blockgate.lab.models.llama import LlamaDecoder


def load(folder: str | None, gguf: str | None, text: str | None, length: int) -> tuple[nn.Module, list[Any]]:
    """A model, and pieces of text with the places of their tokens."""
    if folder is None or text is None:
        sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=500, max_position_embeddings=length, **sizes))
        words = torch.randint(500, (4, length))
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
        tokens = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)(Path(text).read_text())["input_ids"]
        words = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)[:8]
    places = torch.arange(length)
    return model.eval(), [(row, places) for row in words]


def loss(decoder: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of the next token."""
    return F.cross_entropy(decoder(*batch)[:-1], batch[0][1:])


@torch.inference_mode()
def step_time(decoder: nn.Module, steps: int) -> float:
    """Milliseconds of one token after another."""
    token = torch.zeros(1, dtype=torch.long)
    decoder(token, torch.tensor([0]))
    start = time.perf_counter()
    for place in range(1, steps):
        decoder(token, torch.tensor([place]))
    return 1000 * (time.perf_counter() - start) / (steps - 1)


def main() -> None:
    """Converts, packs and compares."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="folder of a model; a small random one if left out")
    parser.add_argument("--gguf", help="name of a GGUF file in that folder")
    parser.add_argument("--text", help="file of text that it is measured on")
    parser.add_argument("--length", type=int, default=128, help="tokens of a piece of text (128)")
    parser.add_argument("--budget", type=float, default=0.2, help="share of the multiply-adds to save (0.2)")
    parser.add_argument("--compile", action="store_true", help="make one graph of a step; takes minutes")
    chosen = parser.parse_args()
    model, pieces = load(chosen.model, chosen.gguf, chosen.text, chosen.length)
    dense = LlamaDecoder(model, chosen.length).eval()
    # Blocks taller than any layer: whole columns. The output layer stays as it is.
    norm: Any = {"gate": "norm", "block_size": (1 << 20, 1), "options": {"head": None}}
    tried, gated = copy.deepcopy(dense), copy.deepcopy(dense)
    bg.sparsify_(tried, **norm)
    allocation = bg.allocate(tried, pieces[:2], chosen.budget, levels=(0.25, 0.5), progress=True)
    print(allocation)
    # Layers at 0 stay without a gate.
    bg.sparsify_(gated, allocation, **norm)
    for name, decoder in {"dense int8": bg.pack(dense, "int8"), "gated int8": bg.pack(gated, "int8")}.items():
        with torch.inference_mode():
            mean = sum(float(loss(decoder, piece)) for piece in pieces) / len(pieces)
        step: Any = torch.compile(decoder, fullgraph=True) if chosen.compile else decoder
        print(f"{name}: loss {mean:.3f}, {step_time(step, chosen.length // 2):.2f} ms a token")


if __name__ == "__main__":
    main()
