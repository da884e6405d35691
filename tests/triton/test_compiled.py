"""Every Triton kernel compiled for GPUs that are not there: machine code, spilled registers, tensor cores, atomics."""

from __future__ import annotations

import os
from collections import Counter

import pytest

pytest.importorskip("triton")

import torch

from blockgate.lab.bench.gpu_kernels import TARGETS, compile_launches
from blockgate.lab.bench.gpu_launches import LAUNCHES, linear_call
from blockgate.ops.gated_linear.triton_rows import rows_forward
from blockgate.ops.gated_linear.triton_tuned import CUTS, _tuned

SLOW = os.environ.get("BLOCKGATE_SLOW") == "1"
# What `make test` compiles; all of it takes minutes.
EVERYWHERE = (
    "scores",
    "select margin",
    "bfloat16 few rows",
    "bfloat16 few rows, shared",
    "packed few rows",
    "bfloat16 many rows",
)
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


def test_a_ramp_of_few_rows_compiles_two_variants():
    def ramp():
        for density in (1.0, 0.7, 0.5, 0.25, 0.1):
            linear_call(1, torch.bfloat16, density=density, backward=False, out_features=768, in_features=3072)()

    names = [kernel.kernel for kernel in compile_launches(ramp, "sm_80")]
    assert sorted(names) == ["add_parts", "rows_forward", "rows_forward"]


# What of CUTS a call chooses among.
TUNED = {
    "one row": (linear_call(1, torch.float16, (64, 16), backward=False), ("rows_forward",)),
    "many rows": (linear_call(512, torch.float16), tuple(CUTS)[1:]),
}


@pytest.mark.parametrize("call", TUNED if SLOW else ["one row"])
def test_every_cut_compiles_and_the_choice_is_kept(call, monkeypatch, executed):
    monkeypatch.setenv("BLOCKGATE_TRITON_AUTOTUNE", "1")
    launch, names = TUNED[call]
    counts = []
    for _ in range(2):
        # As in a new process: what was chosen is found on disk.
        _tuned.cache_clear()
        kernels = Counter(kernel.kernel for kernel in compile_launches(launch, "sm_80"))
        counts.append({name: kernels[name] for name in names})
    _tuned.cache_clear()
    assert counts == [{name: len(CUTS[name]) for name in names}, dict.fromkeys(names, 1)]
    executed(f"cuts that can be tuned, compiled: {sum(counts[0].values())}")


def test_a_ramp_is_tuned_once(monkeypatch):
    monkeypatch.setenv("BLOCKGATE_TRITON_AUTOTUNE", "1")
    monkeypatch.setitem(CUTS, "rows_forward", CUTS["rows_forward"][:2])
    _tuned.cache_clear()

    def ramp():
        for density in (1.0, 0.6, 0.3, 0.1):
            linear_call(1, torch.float16, (64, 16), density, backward=False)()

    kernels = compile_launches(ramp, "sm_80")
    timed = len(_tuned(rows_forward).cache)
    _tuned.cache_clear()
    assert (len(kernels), timed) == (2, 1)
