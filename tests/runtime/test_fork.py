"""A child that is forked after threads have run computes on one thread, where it would have waited for ever."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys, torch
import blockgate as bg
torch.set_num_threads(2)
layer, x = bg.DynamicSparseLinear(512, 512, block_size=64).eval(), torch.randn(64, 512)
lstm, y = bg.DynamicSparseLSTM(256, 256, block_size=64).eval(), torch.randn(8, 4, 256)
packed = bg.pack(layer, "int8")
def outputs():
    with torch.no_grad():
        return [layer(x), packed(x), lstm(y)[0]]
before = outputs()
child = os.fork()
if child == 0:
    same = all(torch.equal(a, b) for a, b in zip(before, outputs(), strict=True))
    os._exit(0 if same else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_computes_the_same():
    ran = subprocess.run([sys.executable, "-c", SCRIPT], timeout=100, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
