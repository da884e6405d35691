"""What `test_interpreter.py` runs in a process of its own, with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from blockgate.errors import BackendError
from blockgate.ops import gated_linear, topk_gates
from blockgate.ops.gated_linear import triton_tuned
from blockgate.ops.gpu import interpreting
from tests.triton import checks
from tests.triton.checks import COMPARED
from tests.triton.faults import FAULTS, broken

assert interpreting(), "run this with TRITON_INTERPRET=1"

# NumPy, which the interpreter computes with, warns of inf - inf.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# Everything takes minutes; `make test` runs a sample.
SLOW = os.environ.get("BLOCKGATE_SLOW") == "1"
slow = pytest.mark.skipif(not SLOW, reason="set BLOCKGATE_SLOW=1")


@pytest.fixture(autouse=True, scope="session")
def report():
    yield
    sys.stdout.write(f"\ncomparisons: {sum(COMPARED.values())} {dict(COMPARED)}\n")


def test_selection():
    checks.check_selection([(2 if SLOW else 1, 3, 7)])
    checks.check_selection([(1, 1, 1), (1, 1, 33)], ("margin",))


@slow
def test_selection_of_more_shapes():
    checks.check_selection([(1, 1, 1), (2, 2, 32), (3, 24, 96), (2, 384, 96), (1, 1, 5000)])


def test_selection_in_several_tiles():
    # 130 groups of 40 scores take more than one tile.
    for rule in checks.RULES if SLOW else ("margin",):
        checks.compare_selection(torch.randn(1, 130 * 40), (13, 130), rule)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rule", checks.RULES)
def test_bad_scores(value, rule):
    scores = torch.randn(2, 12)
    scores[0, 4], scores[1, :] = value, value
    for k in (2, 6) if rule == "margin" else (2,):
        checks.compare_selection(scores, (k, 2), rule)


@pytest.mark.parametrize("scale", [1e-30, 1e19, 1e37])
def test_scale_of_scores(scale):
    for rule in ("mean", "rms"):
        checks.compare_selection(torch.tensor([[1.0, 2.0, 3.0, 4.0, -1.0], [-1.0] * 5]) * scale, (3, 1), rule)


def test_the_default_block():
    checks.check_linear([3, 33] if SLOW else [33], ((300, 40, (256, 16)),), densities=False)


def test_few_rows():
    checks.check_linear([3], checks.GRIDS if SLOW else checks.GRIDS[1:2])
    checks.check_linear([3], checks.GRIDS[3:], densities=False)
    checks.check_linear([1], checks.GRIDS[:3], densities=False)


def test_shared_blocks():
    checks.check_shared() if SLOW else checks.check_shared((2, 7), (3,))


def test_many_rows():
    checks.check_linear([33], checks.GRIDS if SLOW else checks.GRIDS[3:4], densities=False)
    checks.check_linear([70], checks.GRIDS[1:2], densities=False)


def test_more_numbers_of_rows():
    rows, grids = [17, 31, 32, 64, 65, 130], checks.GRIDS[1:4:2] if SLOW else checks.GRIDS[1:2]
    checks.check_linear(rows, grids, densities=SLOW)


def test_blocks_in_several_parts():
    checks.check_linear([3, 33] if SLOW else [33], ((150, 140, (140, 135)),), densities=False)


def test_half_precision():
    for rows, dtype in ((33, torch.float16), (3, torch.bfloat16)):
        checks.check_linear([3, 33] if SLOW else [rows], checks.GRIDS[3:4], dtype, densities=False)


def test_every_cut_that_can_be_chosen(monkeypatch):
    monkeypatch.setattr(triton_tuned, "tuning", lambda: True)
    every = dict(triton_tuned.CUTS)
    for turn in range(max(map(len, every.values()))):
        for name, cuts in every.items():
            monkeypatch.setitem(triton_tuned.CUTS, name, (cuts[turn % len(cuts)],))
        triton_tuned._tuned.cache_clear()
        checks.check_linear([3, 33], ((37, 70, (20, 34)),), densities=False)
    triton_tuned._tuned.cache_clear()


def test_closed_and_crowded():
    checks.check_closed_and_crowded()


def test_strides():
    checks.check_strides()


def test_bad_rows():
    checks.check_bad_rows()


def test_no_rows():
    checks.check_linear([0], checks.GRIDS[1:2])
    gates, indices = topk_gates(torch.empty(0, 12), 2, groups=2, backend="triton")
    assert gates.shape == indices.shape == (0, 4)


def test_packed():
    checks.check_packed([2], checks.PACKED_GRIDS if SLOW else checks.PACKED_GRIDS[:2])
    checks.check_packed([33], checks.PACKED_GRIDS if SLOW else checks.PACKED_GRIDS[:1])
    checks.check_packed([2, 33] if SLOW else [2], checks.PACKED_GRIDS[1:2], torch.bfloat16)


def test_scores():
    checks.check_scores()


def test_pool():
    checks.check_pool()


def test_states_beyond_what_32_bits_count():
    checks.check_far_states()


def test_lstm():
    checks.check_lstm(((3, "margin"),))


def test_gru():
    checks.check_gru(((3, "margin"),))


@slow
def test_gru_with_other_gates():
    checks.check_gru()


@slow
def test_lstm_with_other_gates():
    checks.check_lstm()


def test_what_no_kernel_serves_is_an_error():
    scores = torch.randn(2, 6, dtype=torch.float64)
    with pytest.raises(BackendError, match=r"expected what GPU kernels compute, got: the scores are torch\.float64"):
        topk_gates(scores, 2, backend="triton")
    gates, indices = topk_gates(scores, 2)
    with pytest.raises(BackendError, match=r"expected what GPU kernels compute, got: the input is torch\.float64"):
        gated_linear(
            torch.randn(2, 3).double(), torch.randn(2, 3).double(), None, gates, indices, (1, 1), backend="triton"
        )


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, id=fault.name, marks=[slow] if fault.slow else []) for fault in FAULTS]
)
def test_a_fault_is_noticed(fault, tmp_path):
    with broken(fault, tmp_path), pytest.raises(AssertionError):
        fault.check()
