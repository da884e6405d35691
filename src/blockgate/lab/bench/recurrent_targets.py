"""What `blockgate bench` compares of recurrent networks, with the speed-up we promise over the fastest rival."""

from __future__ import annotations

from collections.abc import Callable

import torch

from blockgate.lab.bench.comparison import Comparison
from blockgate.lab.bench.greedy import compare_greedy
from blockgate.lab.bench.language_model import compare_language_models
from blockgate.lab.bench.recurrent import RecurrentCase, cell_decode, cell_training, qrnn_decode, qrnn_training

__all__ = ["RECURRENT_COMPARISONS", "Planned"]

FP32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8


class Planned:
    """A comparison that is built when its turn comes: together they would need too much memory.

    Args:
        title: what it is about, for progress bars and choosing.
        build: makes it, with all results checked.
        cold: whether to time it with an evicted cache too.
    """

    def __init__(self, title: str, build: Callable[[], Comparison], *, cold: bool = False) -> None:
        self.title, self.build, self.cold = title, build, cold


_LSTM = (
    Planned(
        "decode 2 x 1536",
        lambda: cell_decode(
            RecurrentCase(),
            {
                FP32: {0.5: 1.8, 0.75: 3.2, 0.9: 6.5},
                BF16: {0.5: 3.4, 0.75: 6, 0.9: 11},
                INT8: {0.5: 5, 0.75: 8, 0.9: 13},
            },
        ),
        cold=True,
    ),
    Planned(
        "language model, one token",
        lambda: compare_language_models(RecurrentCase(), 10_000, {0.5: 1.35, 0.75: None, 0.9: 2.2}),
        cold=True,
    ),
    Planned(
        "language model, likeliest word",
        lambda: compare_greedy(
            RecurrentCase(), 10_000, {"dense": {0.5: 1.35, 0.9: 2.4}, "screened": {0.5: 1.6, 0.9: 3.2}}
        ),
        cold=True,
    ),
    Planned(
        "language model, prompt of 35 tokens",
        lambda: compare_language_models(RecurrentCase(steps=35), 10_000, {0.5: 1.0, 0.75: None, 0.9: None}),
    ),
    Planned(
        "both ways 1 x 512",
        lambda: cell_decode(
            RecurrentCase(both=True, hidden=512, layers=1, block=64, key=64, steps=50), {FP32: {0.5: None, 0.75: None}}
        ),
    ),
    Planned(
        "training 2 x 1536",
        lambda: cell_training(RecurrentCase(batch=20, steps=35), {0.5: 1.2, 0.75: None, 0.9: 2.5}),
    ),
    Planned(
        "training 2 x 256",
        lambda: cell_training(
            RecurrentCase(hidden=256, block=32, key=64, batch=20, steps=35), {0.5: 1.0, 0.75: None, 0.9: 1.5}
        ),
    ),
)

_GRU = (
    Planned(
        "decode 2 x 1536",
        lambda: cell_decode(RecurrentCase(cell="GRU"), {t: {0.5: None, 0.75: None, 0.9: None} for t in (FP32, INT8)}),
        cold=True,
    ),
    Planned(
        "decode 2 x 512",
        lambda: cell_decode(
            RecurrentCase(cell="GRU", hidden=512, block=64, key=64), {t: {0.5: None, 0.75: None} for t in (FP32, INT8)}
        ),
    ),
    Planned(
        "both ways 1 x 512",
        lambda: cell_decode(
            RecurrentCase(cell="GRU", both=True, hidden=512, layers=1, block=64, key=64, steps=50),
            {FP32: {0.5: None, 0.75: None}},
        ),
    ),
    Planned(
        "training 2 x 1536",
        lambda: cell_training(RecurrentCase(cell="GRU", batch=20, steps=35), {0.5: None, 0.75: None, 0.9: None}),
    ),
)

_QRNN = (
    Planned(
        "decode 4 x 1536",
        lambda: qrnn_decode(RecurrentCase(layers=4), {t: {0.5: None, 0.9: None} for t in (FP32, BF16, INT8)}),
        cold=True,
    ),
    Planned(
        "training 4 x 1536",
        lambda: qrnn_training(RecurrentCase(layers=4, batch=20, steps=105), {0.5: 1.2, 0.75: None, 0.9: 3}),
    ),
)

RECURRENT_COMPARISONS = {"lstm": _LSTM, "gru": _GRU, "qrnn": _QRNN}
