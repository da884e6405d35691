"""Every kernel on every instruction set that this machine has: the op and layer tests, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from blockgate.ops import native

pytestmark = pytest.mark.skipif(native.unavailable_reason() is not None, reason="native kernels are not built")

ROOT = Path(__file__).parents[2]
KERNEL_TESTS = [
    "tests/ops/test_kernels.py",
    "tests/ops/test_registered.py",
    "tests/ops/test_packed.py",
    "tests/ops/test_packed_integers.py",
    "tests/ops/test_gated_recurrence.py",
    "tests/ops/test_gated_recurrence_use.py",
    "tests/ops/test_prepared_recurrence.py",
    "tests/runtime/test_fused.py",
]


def run(isa: str, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"BLOCKGATE_ISA": isa}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("isa", ["avx512vnni", "avx512", "avx2", "baseline"])
def test_kernels_on(isa):
    asked = run(isa, "-c", "from blockgate.ops import native; print(native.isa())")
    if f"on this machine, got {isa}" in asked.stderr:
        pytest.skip(f"this machine has no {isa}")
    assert asked.stdout.strip() == isa, asked.stderr
    if isa == native.isa():
        pytest.skip("the rest of the suite runs on it")
    result = run(isa, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", *KERNEL_TESTS)
    assert result.returncode == 0, result.stdout[-3000:]


def test_an_unknown_instruction_set_is_an_error():
    result = run("mmx", "-c", "from blockgate.ops import native; native.isa()")
    assert result.returncode != 0
    assert "blockgate.errors.BackendError: BLOCKGATE_ISA: expected one of" in result.stderr
    assert "got mmx; unset it to use the best one" in result.stderr
