"""Every Triton kernel compiled for GPUs that are not there: machine code, spilled registers, tensor cores, atomics."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")

import torch

from blockgate.lab.bench.gpu_kernels import TARGETS, compile_launches
from blockgate.lab.bench.gpu_launches import LAUNCHES

SLOW = os.environ.get("BLOCKGATE_SLOW") == "1"
# What `make test` compiles; all of it takes minutes.
EVERYWHERE = ("scores", "select margin", "bfloat16 few rows", "packed few rows", "bfloat16 many rows")
SAMPLE = {
    "sm_80": (
        *EVERYWHERE,
        "float32 many rows",
        "float16 many rows, blocks of 32",
        "packed many rows",
        "packed many rows of bfloat16",
        "pooling",
        "LSTM",
        "GRU",
    ),
    "sm_90": (*EVERYWHERE, "select global"),
    "sm_100": EVERYWHERE,
    "gfx942": (*EVERYWHERE, "float16 many rows"),
}
# Bytes of a thread that may go to memory, by target, launch and kernel; nothing else may. docs/gpu.md says the same.
SPILLS: dict[tuple[str, str, str], int] = {}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile(target, executed):
    count = 0
    for name in LAUNCHES if SLOW else SAMPLE[target]:
        for kernel in compile_launches(LAUNCHES[name], target):
            count += 1
            assert kernel.size > 1000, (name, kernel)
            assert kernel.spilled <= SPILLS.get((target, name, kernel.kernel), 0), (name, kernel)
            # Results are the same from run to run.
            assert not kernel.float_atomics, (name, kernel)
            # Packed weights next to float32 inputs, and the LSTM's, are multiplied in full precision.
            if kernel.kernel.startswith("tiles") and "float16" in name:
                assert kernel.tensor_cores, (name, kernel)
    assert count
    executed(f"Triton kernels compiled for {target}: {count}")


def test_float32_takes_tensor_cores_where_torch_may():
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        kernels = compile_launches(LAUNCHES["float32 many rows"], "sm_80")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert all(k.tensor_cores for k in kernels if k.kernel.startswith("tiles"))
    assert not any(k.spilled for k in kernels), kernels


def test_float_atomics_would_be_seen():
    import triton
    import triton.language as tl

    def add(x, y):
        tl.atomic_add(y, tl.load(x))

    kernel = triton.jit(add)
    given = torch.empty(1, device="meta")
    for target in ("sm_80", "gfx942"):
        (compiled,) = compile_launches(lambda: kernel[(1,)](given, given), target)
        assert compiled.float_atomics
