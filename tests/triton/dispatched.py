"""What `test_fake_cuda.py` runs in a process of its own, since it gives torch a way to switch between absent GPUs."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import blockgate as bg
from blockgate.runtime.plan import OPS, STEPS
from tests.triton.fake_cuda import fake_cuda, on_fake_cuda, runs_on_cuda

SELECT = ["centred_scores", "topk_gates"]
LSTM = [*SELECT, "gated_linear", "gated_lstm"]
# Layers, the path that they take, and the ops of one call, in order. An LSTM runs two steps.
LAYERS = {
    "linear": (lambda: bg.DynamicSparseLinear(70, 80, block_size=(40, 34)), OPS, [*SELECT, "gated_linear"]),
    "hidden": (
        lambda: bg.DynamicSparseLinear(70, 80, block_size=(40, 34), gate_hidden=4),
        OPS,
        ["centred_scores", *SELECT, "gated_linear"],
    ),
    "eq1": (
        lambda: bg.DynamicSparseLinear(70, 80, block_size=34, gate="eq1"),
        OPS,
        ["gate_scores", "topk_gates", "gated_linear"],
    ),
    "lstm": (lambda: bg.DynamicSparseLSTM(70, 40, 2, block_size=(40, 7)), OPS, LSTM * 2),
    "gru": (
        lambda: bg.DynamicSparseGRU(70, 40, block_size=(40, 7)),
        OPS,
        [*SELECT, "gated_linear", "gated_gru"],
    ),
    "qrnn": (
        lambda: bg.DynamicSparseQRNN(70, 40, 2, block_size=(40, 7)),
        OPS,
        [*SELECT, "gated_linear", "forget_pool"] * 2,
    ),
    "packed": (
        lambda: bg.pack(bg.DynamicSparseLinear(70, 80, block_size=(40, 34)), "int8"),
        OPS,
        [*SELECT, "packed_linear"],
    ),
    "packed dense": (lambda: bg.pack(torch.nn.Linear(70, 80), "int4"), OPS, ["dense_packed_linear"]),
    "packed lstm": (
        lambda: bg.pack(bg.DynamicSparseLSTM(70, 40, block_size=(40, 7)), "bfloat16"),
        STEPS,
        [*SELECT, "packed_linear"] * 3,
    ),
}


@contextmanager
def on_gpu(name: str):
    """A layer and its input."""
    layer = LAYERS[name][0]().eval()
    with fake_cuda():
        yield on_fake_cuda(layer), torch.empty(2, 3, 70, device="cuda")


@pytest.mark.parametrize("name", LAYERS)
def test_a_call(name):
    with on_gpu(name) as (layer, x):
        y = layer(x)
        y = y[0] if isinstance(y, tuple) else y
        paths = {row.path for row in bg.explain(layer, x).layers}
    assert (y.device.type, y.shape[:2], paths) == ("cuda", (2, 3), {LAYERS[name][1]})


@pytest.mark.parametrize("name", LAYERS)
def test_torch_compile_captures_one_graph(name):
    torch._dynamo.reset()
    with on_gpu(name) as (layer, x):
        y = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    y = y[0] if isinstance(y, tuple) else y
    assert (y.device.type, y.shape[:2]) == ("cuda", (2, 3))


@pytest.mark.parametrize("name", LAYERS)
def test_an_exported_program_calls_ops_with_gpu_kernels(name):
    with on_gpu(name) as (layer, x):
        program = torch.export.export(layer, (x,))
    called = [str(node.target) for node in program.graph.nodes if str(node.target).startswith("blockgate")]
    ops = [op.split(".")[1] for op in called]
    assert ops == LAYERS[name][2]
    # torch's own product is right for the scores of other gates.
    assert all(runs_on_cuda(op) for op in ops if op != "gate_scores")
