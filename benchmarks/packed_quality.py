"""What packing costs a small trained language model, in perplexity: the table of docs/performance.md.

Run from the root of the repository: python benchmarks/packed_quality.py > benchmarks/results/packed-quality.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import blockgate as bg
from blockgate.formats import FORMATS
from blockgate.lab.bench import machine
from tests.runtime.test_packed_quality import perplexity, train_model


def main() -> None:
    """Trains the model of the test, packs it to every format, and prints perplexities as JSON."""
    torch.set_num_threads(1)
    model, text = train_model()
    found = {name: perplexity(bg.pack(model, name), text) for name in FORMATS}
    print(json.dumps({**machine.describe(), "seed": 0, "unpacked": perplexity(model, text), "packed": found}, indent=1))


if __name__ == "__main__":
    main()
