"""Settings for the whole suite: few, known hypothesis profiles, and memory that betrays whoever forgets to write it."""

from __future__ import annotations

import os
import signal
import tempfile

# Virtual machines may announce matrix units that kill the process when oneDNN uses them, as torch's own bfloat16
# products do. Before torch is imported, and for every process that a test starts.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# What Triton does today, said so that it need not warn that the default will change.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
# A graph that torch compiled for an older version of our ops, and kept on the disk, would be run instead of ours.
COMPILED = tempfile.TemporaryDirectory(prefix="blockgate-tests-", ignore_cleanup_errors=True)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = COMPILED.name

import pytest
import torch
from hypothesis import settings

settings.register_profile("suite", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("suite")


# The name of properties that tests record of what they executed in other processes: counts that must not be invisible.
EXECUTED = "executed"


def pytest_terminal_summary(terminalreporter) -> None:
    """Prints them at the end of a run. Reports carry them home from the workers of xdist."""
    for report in terminalreporter.getreports("passed"):
        for name, line in report.user_properties:
            if name == EXECUTED:
                terminalreporter.write_line(line)


@pytest.fixture
def executed(record_property):
    """A function that takes one line about what a test executed, for the end of the run."""
    return lambda line: record_property(EXECUTED, line)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def ctrl_c() -> None:
    """Jobs in the background of a shell ignore Ctrl-C; the processes that tests interrupt must not inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def nan_filled_memory():
    """Fills fresh memory with NaN, so that a cell that a kernel never writes shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
