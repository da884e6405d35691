"""What an atlas page holds, read back in Python; and models that make good ones."""

from __future__ import annotations

import base64
import json
import re
from typing import TYPE_CHECKING, Any

import torch

import blockgate as bg

if TYPE_CHECKING:
    from pathlib import Path

HISTORY = [
    {"epoch": 1, "always_open": 0.5, "input_dependent": 0.5, "dead_blocks": 0.0},
    {"epoch": "2", "always_open": "0.25", "input_dependent": "0.5", "dead_blocks": "0.125", "density": "0.3"},
]


def read_page(page: Path) -> dict[str, Any]:
    """The data of a page."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    return json.loads(text)


def numbers(text: str, dtype: torch.dtype) -> torch.Tensor:
    """What base64 stands for."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype)


def lstm_record(words: list[str], *, classes: int = 3, hidden: int = 48, **options: Any) -> bg.inspect.GateRecord:
    """An LSTM of two layers that reads some words, with their numbers as classes."""
    torch.manual_seed(0)
    sizes = {"block_size": (16, 8), "key_size": 16, "sparsity": 0.5} | options
    lstm = bg.DynamicSparseLSTM(hidden, hidden, 2, **sizes).eval()
    known = sorted(set(words))
    vectors = torch.randn(len(known), hidden)
    read = torch.tensor([known.index(word) for word in words])
    record = bg.record_gates(lstm, trace=len(words), coactivation=False)
    with torch.no_grad(), record, record.labelled(read % classes):
        lstm(vectors[read][:, None])
    return record
