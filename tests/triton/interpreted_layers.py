"""Layers and whole models on the Triton kernels: the other half of what `test_interpreter.py` runs."""

from __future__ import annotations

import itertools
import os
import sys

import pytest
import torch
from torch.library import opcheck

import blockgate as bg
from blockgate.ops import topk_gates
from blockgate.ops.gpu import interpreting
from tests.helpers import assert_close
from tests.triton import features
from tests.triton.checks import COMPARED, same

assert interpreting(), "run this with TRITON_INTERPRET=1"

# NumPy, which the interpreter computes with, warns of inf - inf.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SLOW = os.environ.get("BLOCKGATE_SLOW") == "1"


@pytest.fixture(autouse=True, scope="session")
def report():
    yield
    counts = COMPARED + features.COMPARED
    sys.stdout.write(f"\ncomparisons: {sum(counts.values())} {dict(counts)}\n")


LAYERS = {
    "linear": lambda backend: bg.DynamicSparseLinear(30, 44, block_size=(16, 7), backend=backend),
    "eq1": lambda backend: bg.DynamicSparseLinear(30, 44, block_size=9, gate="eq1", backend=backend),
    "rms per row": lambda backend: bg.DynamicSparseLinear(
        30, 44, block_size=(16, 7), gate="topk", normalise="rms", select="per_row", backend=backend
    ),
    "rms global": lambda backend: bg.DynamicSparseLinear(
        30, 44, block_size=9, gate="topk", normalise="rms", select="global", backend=backend
    ),
    "sigmoid": lambda backend: bg.DynamicSparseLinear(
        30, 44, block_size=9, gate="sigmoid", sparsity=0, backend=backend
    ),
    "norm": lambda backend: bg.DynamicSparseLinear(30, 44, block_size=(16, 3), gate="norm", backend=backend),
    "near dense": lambda backend: bg.DynamicSparseLinear.from_dense(
        torch.nn.Linear(30, 44), block_size=(16, 7), sparsity=0.25, backend=backend
    ),
    "softmax_sum": lambda backend: bg.DynamicSparseLinear(30, 44, block_size=9, gate="softmax_sum", backend=backend),
    "hidden": lambda backend: bg.DynamicSparseLinear(30, 44, block_size=(16, 7), gate_hidden=4, backend=backend),
    "lstm": lambda backend: bg.DynamicSparseLSTM(30, 12, 2 if SLOW else 1, block_size=(16, 5), backend=backend),
    "gru": lambda backend: bg.DynamicSparseGRU(30, 12, block_size=(16, 5), backend=backend),
    "qrnn": lambda backend: bg.DynamicSparseQRNN(30, 12, 2 if SLOW else 1, block_size=(16, 7), backend=backend),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind):
    """Output and the gradients of input and parameters, in training and in eval, as the reference has them."""
    ours, theirs = LAYERS[kind]("triton"), LAYERS[kind]("reference")
    theirs.load_state_dict(ours.state_dict())
    # Many rows and few; each step of a recurrent layer costs the interpreter a second.
    shape = (4, 5, 30) if SLOW or kind == "linear" else (2, 3, 30)
    for mode in (True, False):
        x = torch.randn(shape)
        results = []
        for layer in (ours.train(mode), theirs.train(mode)):
            layer.zero_grad()
            given = x.clone().requires_grad_()
            torch.manual_seed(1)
            y = layer(given)
            y = y[0] if isinstance(y, tuple) else y
            y.square().sum().backward()
            results.append([y, given.grad, *(p.grad for p in layer.parameters())])
        for got, want in zip(*results, strict=True):
            # The hard gates of softmax_sum pass no gradient on.
            assert (got is None) == (want is None)
            if want is not None:
                same(f"layer {kind}", got, want)
        ours.load_state_dict(theirs.state_dict())


def test_inference_and_what_explain_says():
    layer = LAYERS["linear"]("triton").eval()
    x = torch.randn(3, 30)
    with torch.inference_mode():
        same("inference", layer(x), LAYERS["linear"]("reference").eval().__class__.forward(layer, x))
        explained = bg.explain(layer, x).layers[0]
    assert (explained.path, explained.why) == ("separate ops", "backend='triton' was asked for")


def test_autocast_multiplies_in_half_precision():
    # In training, each call would move the running means that the gate reads.
    layer = LAYERS["linear"]("triton").eval()
    x = torch.randn(20, 30)
    want = layer(x)
    with torch.autocast("cpu", torch.float16):
        got = layer(x)
    assert got.dtype is torch.float16
    assert_close(got, want, "autocast")
    got.float().square().sum().backward()
    assert layer.weight.grad.isfinite().all()
    COMPARED["autocast"] += 1


@pytest.mark.parametrize("check", [features.check_training, features.check_reports, features.check_packing])
def test_a_whole_model(check):
    check("cpu")


def test_a_packed_model_in_half_precision():
    features.check_packing("cpu", ("int8",), 17, torch.bfloat16)


def test_a_saved_model(tmp_path):
    features.check_saving("cpu", tmp_path)


HALF = [*itertools.product(("lstm", "qrnn"), (torch.bfloat16, torch.float16), (False, True))]
HALF += [("gru", torch.bfloat16, False), ("gru", torch.float16, True)]
HALF += [("linear", torch.bfloat16, False), ("linear", torch.bfloat16, True)]


@pytest.mark.parametrize(("kind", "dtype", "autocast"), HALF if SLOW else HALF[::2] + HALF[-1:])
def test_half_precision(kind, dtype, autocast):
    features.check_half_precision(kind, "cpu", dtype, autocast)


def test_compiled_layers_capture_one_graph_for_a_ramp():
    torch._dynamo.reset()
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    layer = bg.DynamicSparseLinear(40, 20, block_size=(16, 4), sparsity=0.0, backend="triton").eval()
    compiled, x = torch.compile(layer, backend=count, fullgraph=True), torch.randn(3, 40)
    with torch.no_grad():
        for sparsity in (0.1, 0.3, 0.5, 0.9):
            layer.sparsity = sparsity
            same("compiled layer", compiled(x), layer(x))
    assert len(graphs) == 1


def leaves(*shapes):
    return tuple(torch.rand(shape, requires_grad=True) for shape in shapes)


def small_lstm():
    grid = bg.grid.BlockGrid(12, 3, (4, 3))
    gate = (torch.randn(3, 2), torch.randn(3), None, None)
    tensors = (torch.randn(2, 1, 12), torch.randn(1, 3), torch.randn(1, 3), torch.randn(12, 3), torch.randn(12), *gate)
    assert grid.num_blocks == 3
    return (*(None if t is None else t.requires_grad_() for t in tensors), [0, 2], [4, 3], [1, 3], "rms")


def small_gru():
    gate = (torch.randn(3, 2), torch.randn(3), None, None)
    tensors = (torch.randn(2, 1, 9), torch.randn(1, 3), torch.randn(9, 3), torch.randn(9), *gate)
    return (*(None if t is None else t.requires_grad_() for t in tensors), [0, 2], [3, 3], [1, 3], "rms")


def small_linear():
    gates, indices = topk_gates(torch.randn(2, 4), 2)
    return (
        torch.randn(2, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True), torch.randn(3),
        gates.requires_grad_(), indices, [2, 3],
    )  # fmt: skip


OPS = {
    "centred_scores": lambda: (*leaves((2, 5), (3, 5), (3,)), torch.randn(5)),
    "topk_gates": lambda: (torch.randn(2, 6, requires_grad=True), [2, 2], "margin"),
    "gated_linear": small_linear,
    "forget_pool": lambda: leaves((2, 1, 3), (2, 1, 3), (1, 3)),
    "gated_lstm": small_lstm,
    "gated_gru": small_gru,
}


@pytest.mark.parametrize("op", OPS)
def test_opcheck(op):
    opcheck(getattr(torch.ops.blockgate, f"{op}_triton").default, OPS[op]())
    COMPARED["opcheck"] += 1


def test_opcheck_of_packed_products():
    weight, grid = torch.randn(8, 5), [8, 5, 4, 3]
    gates, indices = topk_gates(torch.randn(2, 4), 2)
    stored = torch.ops.blockgate.pack_blocks(weight, [4, 3], "int8")
    opcheck(
        torch.ops.blockgate.packed_linear_triton.default,
        (torch.randn(2, 5), *stored, None, gates, indices, grid, "int8"),
    )
    opcheck(torch.ops.blockgate.dense_packed_linear_triton.default, (torch.randn(2, 5), *stored, None, grid, "int8"))
    COMPARED["opcheck"] += 2
