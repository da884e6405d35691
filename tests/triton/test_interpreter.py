"""The Triton kernels in Triton's interpreter, in a process of its own: it changes how kernels are made."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(executed, file: str, **environment: str) -> int:
    """Runs all checks of a file; returns how many comparisons they made."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", f"tests/triton/{file}"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} | environment
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    executed(f"{file}, Triton kernels in the interpreter: " + re.search(r"comparisons: .*", result.stdout)[0])
    return int(re.search(r"comparisons: (\d+)", result.stdout)[1])


# Files, and the least number of comparisons of each: a run that skipped its checks would pass otherwise.
FILES = {"interpreted.py": 450, "interpreted_layers.py": 170}


# A minute of work, which a machine that others use too may stretch.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", FILES)
def test_kernels_equal_the_reference_and_faults_are_noticed(file, executed):
    assert run(executed, file) >= FILES[file]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("file", FILES)
@pytest.mark.skipif(os.environ.get("BLOCKGATE_SLOW") != "1", reason="set BLOCKGATE_SLOW=1")
def test_more_shapes(file, executed):
    assert run(executed, file, BLOCKGATE_SLOW="1") > FILES[file]


def test_counts_come_home_from_workers():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--numprocesses", "1"]
    file = "tests/triton/test_fake_cuda.py"
    result = subprocess.run(
        [*command, f"{file}::test_every_op_with_kernels_is_registered_for_gpus"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert re.search(r"^ops with Triton kernels: \d+$", result.stdout, re.MULTILINE), result.stdout[-2000:]
