"""The same comparisons on a GPU, where there is one; and what only a GPU can show."""

from __future__ import annotations

import pytest
import torch

import blockgate as bg
from blockgate.ops.gpu import FORMATS

pytest.importorskip("triton")

from tests.triton import checks, features

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

CHECKS = {
    "selection": lambda: checks.check_selection([(1, 1, 1), (3, 24, 96), (2, 384, 96), (2, 1, 5000)]),
    "few rows": lambda: checks.check_linear([0, 1, 3, 16]),
    "shared": checks.check_shared,
    "many rows": lambda: checks.check_linear([17, 32, 65, 130, 1000]),
    "large": lambda: checks.check_linear([2000], ((1024, 768, (256, 16)), (768, 1024, (128, 128)))),
    "float16": lambda: checks.check_linear([3, 130], dtype=torch.float16),
    "bfloat16": lambda: checks.check_linear([3, 130], dtype=torch.bfloat16),
    "crowded": checks.check_closed_and_crowded,
    "strides": checks.check_strides,
    "bad rows": checks.check_bad_rows,
    "scores": lambda: checks.check_scores((0, 1, 4, 5, 130)),
    "packed": lambda: checks.check_packed([1, 3, 130]),
    "packed bfloat16": lambda: checks.check_packed([3, 130], dtype=torch.bfloat16),
    "packed float16": lambda: checks.check_packed([3, 130], dtype=torch.float16),
    "pool": checks.check_pool,
    "LSTM": checks.check_lstm,
    "GRU": checks.check_gru,
}


@pytest.mark.parametrize("name", CHECKS)
def test_kernels_equal_the_reference(name):
    with torch.device("cuda"):
        CHECKS[name]()


def test_the_fastest_cuts_equal_the_reference(monkeypatch, tmp_path):
    monkeypatch.setenv("BLOCKGATE_TRITON_AUTOTUNE", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with torch.device("cuda"):
        checks.check_linear([3, 130], ((768, 1024, (256, 16)),))


def layer_and_input():
    layer = bg.DynamicSparseLinear(768, 1024, block_size=(256, 16), sparsity=0.75, device="cuda")
    return layer, torch.randn(500, 768, device="cuda")


def test_two_runs_give_the_same_bits():
    layer, x = layer_and_input()
    results = []
    for _ in range(2):
        layer.zero_grad()
        y = layer.eval()(x)
        y.square().sum().backward()
        results.append([y, *(p.grad for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_cuda_graph_captures_inference():
    layer, x = layer_and_input()
    with torch.inference_mode():
        want = layer.eval()(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = layer(x)
        x.copy_(x.flip(0))
        graph.replay()
    torch.testing.assert_close(got, want.flip(0))


def test_a_compiled_layer_equals_the_layer():
    layer, x = layer_and_input()
    torch.testing.assert_close(torch.compile(layer.eval(), fullgraph=True)(x), layer(x))


@pytest.mark.parametrize("check", [features.check_training, features.check_reports, features.check_packing])
def test_a_whole_model(check):
    check("cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_packed_model_in_half_precision(dtype):
    features.check_packing("cuda", FORMATS[1:], 130, dtype)


def test_a_saved_model(tmp_path):
    features.check_saving("cuda", tmp_path)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", features.LAYERS)
def test_half_precision(kind, dtype, autocast):
    features.check_half_precision(kind, "cuda", dtype, autocast)


@pytest.mark.parametrize("form", [bg.DynamicSparseLSTM, bg.DynamicSparseGRU])
def test_a_cuda_graph_captures_a_sequence(form):
    layer = form(64, 64, block_size=(64, 8), device="cuda").eval()
    x = torch.randn(5, 4, 64, device="cuda")
    with torch.inference_mode():
        want, _ = layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got, _ = layer(x)
        graph.replay()
    torch.testing.assert_close(got, want)


def test_a_ramp_compiles_a_layer_once():
    torch._dynamo.reset()
    layer, x = layer_and_input()
    layer.eval().sparsity = 0.0
    compiled = torch.compile(layer, fullgraph=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for sparsity in (0.0, 0.3, 0.6, 0.9):
            layer.sparsity = sparsity
            torch.testing.assert_close(compiled(x), layer(x))
