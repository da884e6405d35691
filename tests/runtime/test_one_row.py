"""One row through a packed gated layer: a parallel region of its own, and the bits of all other paths."""

from __future__ import annotations

import pytest
import torch

import blockgate as bg
from blockgate.formats import FORMATS
from blockgate.inspect.timing import using_threads
from blockgate.ops import native
from blockgate.ops.packed_linear import packed_linear

pytestmark = pytest.mark.skipif(native.unavailable_reason() is not None, reason="native kernels are not built")

# Whole and ragged blocks, thin ones, few rows of blocks (whose panels are shared out), many.
CASES = [
    (1536, 768, {"block_size": 128}),
    (1200, 500, {"block_size": (256, 16)}),
    (300, 1000, {"block_size": 37}),
    (520, 300, {"block_size": (520, 20)}),
    (1536, 768, {"block_size": 64, "select": "global", "gate": "topk"}),
    (1536, 768, {"block_size": 64, "gate": "topk", "gate_hidden": 40}),
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs", "options"), CASES, ids=str)
def test_one_row_has_the_bits_of_every_path(name, outputs, inputs, options):
    torch.manual_seed(0)
    layer = bg.DynamicSparseLinear(inputs, outputs, key_size=100, **options).eval()
    rows = torch.randn(6, inputs)
    with torch.inference_mode():
        for sparsity in (0.0, 0.6, 0.9, 0.99):
            layer.sparsity = sparsity
            fast = bg.pack(layer, name)
            packed = fast.packed
            gates, indices = fast.gate(rows)
            want = packed_linear(rows, packed.blocks, packed.scale, fast.bias, gates, indices, packed.sizes, name)
            torch.testing.assert_close(fast(rows), want, rtol=0, atol=0)
            for threads in (1, 2, 2, 2):
                with using_threads(threads):
                    for row in range(len(rows)):
                        torch.testing.assert_close(fast(rows[row]), want[row], rtol=0, atol=0)


def test_a_row_that_opens_nothing_is_the_bias():
    layer = bg.DynamicSparseLinear(64, 512, block_size=(64, 16), gate="topk").eval()
    torch.nn.init.constant_(layer.gate.bias, -100.0)
    fast, x = bg.pack(layer, "int8"), torch.randn(64)
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), fast.bias, rtol=0, atol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_a_bad_input_spoils_the_row(name):
    fast, x = bg.pack(bg.DynamicSparseLinear(256, 512, block_size=64, sparsity=0.9).eval(), name), torch.randn(256)
    x[200] = float("nan")
    with torch.inference_mode():
        assert fast(x).isnan().all()
