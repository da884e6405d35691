"""Native memory runs out at every place in turn: one clear error, and the next call is right again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.ops import native

pytestmark = pytest.mark.skipif(native.unavailable_reason() is not None, reason="native kernels are not built")


def linear(format_name=None):
    layer = bg.DynamicSparseLinear(200, 200, block_size=(48, 40), gate_hidden=8).eval()
    return (bg.pack(layer, format_name) if format_name else layer), torch.randn(70, 200)


def lstm(format_name=None):
    layer = bg.DynamicSparseLSTM(72, 72, 2, block_size=(48, 40), gate_hidden=8).eval()
    return (bg.pack(layer, format_name) if format_name else layer), torch.randn(4, 9, 72)


def columns(format_name):
    layer = bg.DynamicSparseLinear(200, 200, block_size=(100, 1), gate="norm").eval()
    return bg.pack(layer, format_name), torch.randn(70, 200)


def qrnn(format_name=None):
    layer = bg.DynamicSparseQRNN(72, 72, 2, block_size=(48, 40), gate_hidden=8).eval()
    return (bg.pack(layer, format_name) if format_name else layer), torch.randn(4, 9, 72)


def screened():
    return bg.pack(nn.Sequential(nn.Linear(72, 600)), screened="0")[0], torch.randn(5, 72)


def infer(layer, x):
    with torch.no_grad():
        return tensors_in(layer(x))


def search(layer, x):
    found = layer.topk(x, 7)
    return [found.values, found.indices, layer.rank(x, torch.arange(len(x))), layer.count_survivors(x, 7)]


def tensors_in(y):
    """Every tensor in what a layer returned."""
    if isinstance(y, torch.Tensor):
        return [y.detach()]
    return [tensor for part in y if part is not None for tensor in tensors_in(part)]


def train(layer, x):
    x = x.clone().requires_grad_()
    y = layer(x)
    y = y if isinstance(y, torch.Tensor) else y[0]
    return [y.detach(), *torch.autograd.grad(y.sum(), [x, *layer.parameters()])]


FORMATS = ("float32", "bfloat16", "float16", "int8", "int8a8", "int4")


CASES = {
    **{f"linear, {f}": (lambda f=f: linear(f), infer) for f in (None, *FORMATS)},
    **{f"LSTM, {f}": (lambda f=f: lstm(f), infer) for f in (None, "int8", "int8a8")},
    **{f"Quasi-RNN, {f}": (lambda f=f: qrnn(f), infer) for f in (None, "int8", "int8a8")},
    **{f"columns, {f}": (lambda f=f: columns(f), infer) for f in FORMATS if f != "int8a8"},
    "screened": (screened, search),
    "linear, training": (linear, train),
    "LSTM, training": (lstm, train),
    "Quasi-RNN, training": (qrnn, train),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_every_request_for_memory_may_fail(case, threads):
    make, use = CASES[case]
    layer, x = make()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    fail, hold_way = torch.ops.blockgate.fail_request, torch.ops.blockgate.hold_way
    # The first way, on all threads. Left to choose, calls would differ in how often they ask for memory.
    hold_way(0)
    try:
        expected = use(layer, x)
        fail(1 << 40)
        use(layer, x)
        requests = fail(0)
        assert requests > 0
        for which in range(1, requests + 1):
            fail(which)
            try:
                with pytest.raises((RuntimeError, MemoryError), match=r"(?i)alloc|memory"):
                    use(layer, x)
            finally:
                fail(0)
            for again, once in zip(use(layer, x), expected, strict=True):
                assert torch.equal(again, once)
    finally:
        fail(0)
        hold_way(-1)
        torch.set_num_threads(before)
