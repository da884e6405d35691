"""The top k of an output layer, and the rank of a target, exact and with few scores computed.

`weight` (V, n) and `bias` are those of the layer; `codes`, `steps` and `rows` are the `Screen` made of them.
See `reference.py` for what a score is, to the last bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockgate.ops.registry import define, library
from blockgate.ops.screened_topk import reference

__all__ = [
    "count_survivors",
    "prepare_screened",
    "release_screened",
    "run_screened_rank",
    "run_screened_topk",
    "screened_rank",
    "screened_topk",
]

_LAYER = "Tensor weight, Tensor? bias, Tensor codes, Tensor steps, Tensor rows"


def _fake_topk(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], others[-1])
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


def _fake_rank(x: Tensor, targets: Tensor, *_: Any) -> Tensor:  # noqa: ARG001
    return torch.empty_like(targets)


define(
    "screened_topk", f"(Tensor x, {_LAYER}, SymInt k) -> (Tensor, Tensor)",
    kernel=reference.screened_topk, fake=_fake_topk, cpu_only=True,
)  # fmt: skip
define(
    "screened_rank", f"(Tensor x, Tensor targets, {_LAYER}) -> Tensor",
    kernel=reference.screened_rank, fake=_fake_rank, cpu_only=True,
)  # fmt: skip

# Layers prepared for many calls, as in `packed_linear`: native only and never traced.
library.define(f"prepare_screened({_LAYER}) -> int")
library.define("run_screened_topk(Tensor x, int handle, int k) -> (Tensor, Tensor)")
library.define("run_screened_rank(Tensor x, Tensor targets, int handle) -> Tensor")
library.define("count_survivors(Tensor x, int handle, int k) -> Tensor")
library.define("release_screened(int handle) -> ()")

screened_topk = torch.ops.blockgate.screened_topk
screened_rank = torch.ops.blockgate.screened_rank
prepare_screened = torch.ops.blockgate.prepare_screened
run_screened_topk = torch.ops.blockgate.run_screened_topk.default
run_screened_rank = torch.ops.blockgate.run_screened_rank.default
count_survivors = torch.ops.blockgate.count_survivors
release_screened = torch.ops.blockgate.release_screened
