"""What is registered for GPUs, and how calls, torch.compile and torch.export find it; without a GPU."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import blockgate as bg
from blockgate.errors import BackendError
from blockgate.ops import gpu

triton = pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


def test_calls_compiled_and_exported_layers(executed):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/triton/dispatched.py"]
    result = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    count = int(re.search(r"(\d+) passed", result.stdout)[1])
    assert count >= 27
    executed(f"layers called, compiled and exported on GPU tensors without data: {count}")


def test_every_op_with_kernels_is_registered_for_gpus(executed):
    pairs = ("topk_gates", "gated_linear", "forget_pool", "gated_lstm", "gated_gru")
    ops = [f"{name}{end}" for name in pairs for end in ("", "_backward")]
    ops += ["centred_scores", "packed_linear", "dense_packed_linear"]
    for op in ops:
        for key in ("CUDA", "XPU"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"blockgate::{op}", key)
    executed(f"ops with Triton kernels: {len(ops)}")


def on_cuda_key(op: str, *args):
    """Calls what is registered for CUDA with tensors on the CPU: what it does before it launches anything."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    return getattr(torch.ops.blockgate, op).default.redispatch(keys, *args)


# What no kernel computes, and the reason that is logged.
UNSERVED = {
    "topk_gates": (lambda: (torch.randn(2, 6).double(), [2, 1], "rms"), "the scores are torch.float64"),
    "column_linear": (
        lambda: (
            torch.randn(2, 4), *bg.formats.columns.pack_columns(torch.randn(8, 4), GRID, "float32"), None,
            torch.rand(1, 4), [8, 4, 8, 1], 2, "float32",
        ),
        "it has kernels for the CPU only",
    ),
}  # fmt: skip
GRID = bg.grid.BlockGrid(8, 4, (8, 1))


@pytest.mark.parametrize("op", UNSERVED)
def test_a_fallback_is_logged_once(op, caplog, monkeypatch):
    monkeypatch.setattr(gpu, "_logged", set())
    make, reason = UNSERVED[op]
    args = make()
    with caplog.at_level(logging.WARNING, logger="blockgate"):
        got = [on_cuda_key(op, *args) for _ in range(2)]
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{op} runs on the slow reference: {reason}")
    want = getattr(torch.ops.blockgate, f"{op}_reference")(*args)
    for ours in got:
        torch.testing.assert_close(ours, want)


def test_cpu_tensors_without_the_interpreter_are_an_error():
    layer = bg.DynamicSparseLinear(8, 8, block_size=2, backend="triton")
    with pytest.raises(BackendError, match=r"expected tensors on a GPU, got none: tensors are on the CPU; move them"):
        layer(torch.randn(2, 8))
