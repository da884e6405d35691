"""Gates in half precision, in training too."""

from __future__ import annotations

import pytest
import torch

import blockgate as bg
from blockgate.gates import gate_kinds


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hidden", [None, 4])
@pytest.mark.parametrize("kind", ["margin", "topk", "softmax_sum", "sigmoid"])
def test_every_kind_trains_in_half_precision(kind, hidden, dtype):
    assert kind in gate_kinds()
    sparsity = 0.0 if kind == "sigmoid" else 0.5
    layer = bg.DynamicSparseLinear(16, 16, block_size=4, gate=kind, gate_hidden=hidden, sparsity=sparsity, dtype=dtype)
    layer(torch.randn(6, 16, dtype=dtype)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    if kind == "margin":
        assert all(mean.dtype == dtype and mean.any() for mean in layer.gate.buffers())
