"""Inference in one native call: the same result, bit for bit, as every other path, and never from stale weights."""

from __future__ import annotations

import copy
import gc
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

import blockgate as bg
from blockgate.gates.topk import TopKGate
from blockgate.ops import gated_linear, native
from blockgate.spec import GateSpec
from tests.helpers import assert_close, dense_mask_linear

pytestmark = pytest.mark.skipif(native.unavailable_reason() is not None, reason="native kernels are not built")

OPTIONS = [
    {},
    {"normalise": "rms", "select": "per_row"},
    {"normalise": "none", "key_size": None},
    {"gate": "margin", "key_size": None},
    {"gate_hidden": 5, "key_size": 7, "key_offset": 3},
    {"bias": False, "block_size": (24, 10)},
]


def make(in_features=50, out_features=70, **options) -> bg.DynamicSparseLinear:
    return bg.DynamicSparseLinear(in_features, out_features, **{"block_size": 16, "sparsity": 0.6, **options}).eval()


def unfused(layer: bg.DynamicSparseLinear, x):
    """The same layer through the separate ops, as training runs them."""
    gates, indices = layer.gate(x)
    return gated_linear(x, layer.weight, layer.bias, gates, indices, layer.grid.block)


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6, 7, 33, 300])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_fused_equals_training_path_bit_for_bit(rows, options):
    layer = make(**options)
    x = torch.randn(rows, 50)
    with torch.no_grad():
        y = layer(x)
        torch.testing.assert_close(y, unfused(layer, x), rtol=0, atol=0)
        assert_close(y, dense_mask_linear(x, layer.weight, layer.bias, layer.gates(x), layer.grid))


@torch.no_grad()
@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.integers(8, 256),
    st.integers(8, 256),
    st.floats(0, 0.99),
    st.integers(1, 40),
)
def test_a_row_does_not_depend_on_its_batch(m, n, block_out, block_in, sparsity, rows):
    layer = make(n, m, block_size=(block_out, block_in), sparsity=sparsity)
    x = torch.randn(rows, n)
    together = layer(x)
    for row in {0, rows // 2, rows - 1}:
        torch.testing.assert_close(layer(x[row : row + 1])[0], together[row], rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 3, 64, 2000])
def test_threads_change_no_bit(rows):
    layer, x = make(300, 500, block_size=64), torch.randn(rows, 300)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(layer(x))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


@torch.no_grad()
def test_gates_names_exactly_the_blocks_that_forward_uses():
    layer, x = make(), torch.randn(20, 50)
    gates = layer.gates(x)
    before = layer(x)
    for row, opened in enumerate(gates.flatten(1) != 0):
        used = opened.nonzero().flatten().tolist()
        closed = (~opened).nonzero().flatten().tolist()
        poisoned = copy.deepcopy(layer)
        for block in closed:
            poisoned.weight[poisoned.grid.slices(block)] = float("nan")
        torch.testing.assert_close(poisoned(x[row]), before[row], rtol=0, atol=0)
        poisoned.weight[poisoned.grid.slices(used[0])] = float("nan")
        assert not torch.isfinite(poisoned(x[row])).all()


@torch.no_grad()
def test_the_reference_backend_is_obeyed_at_any_time(monkeypatch):
    layer, x = make(), torch.randn(3, 50)
    want = layer(x)
    monkeypatch.setattr("blockgate.runtime.prepared.run_prepared_linear", None)
    layer.gate.spec = replace(layer.spec, backend="reference")
    assert layer.backend == "reference"
    assert_close(layer(x), want)


@torch.no_grad()
def test_hooks_and_subclasses_of_the_gate_are_run():
    layer, x = make(), torch.randn(3, 50)
    layer(x)
    seen = []
    handle = layer.gate.register_forward_hook(lambda *_: seen.append(1))
    layer(x)
    handle.remove()
    layer(x)
    assert seen == [1]

    class Inverted(TopKGate):
        def scores(self, x):
            return -super().scores(x)

    layer.gate = Inverted(layer.grid, GateSpec(sparsity=0.6))
    torch.testing.assert_close(layer(x), unfused(layer, x), rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize(
    "prepare",
    [
        nn.utils.parametrizations.weight_norm,
        lambda layer: nn.utils.parametrizations.weight_norm(layer.gate),
        lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
        lambda layer: prune.l1_unstructured(layer, "bias", 0.3),
    ],
    ids=["weight_norm", "gate weight_norm", "pruned weight", "pruned bias"],
)
def test_parametrized_and_pruned_layers_work(prepare):
    layer, x = make(), torch.randn(3, 50)
    prepare(layer)
    torch.testing.assert_close(layer(x), unfused(layer, x), rtol=0, atol=0)


def test_inference_tensors_work():
    with torch.inference_mode():
        layer, x = make(), torch.randn(3, 50)
        first = layer(x)
        layer.weight.mul_(2)
        assert not torch.equal(layer(x), first)
        torch.testing.assert_close(layer(x), unfused(layer, x), rtol=0, atol=0)
    ordinary = make()
    with torch.inference_mode():
        torch.testing.assert_close(ordinary(x), unfused(ordinary, x), rtol=0, atol=0)


def test_eval_with_gradients_stays_differentiable():
    layer, x = make(), torch.randn(3, 50, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.gate.weight.grad is not None


@torch.no_grad()
def test_training_gives_the_packed_memory_back():
    layer = make()
    layer(torch.randn(1, 50))
    assert layer._copy._state is not None
    layer.train()
    assert layer._copy._state is None


@torch.no_grad()
def test_leading_dimensions_and_strides():
    layer, x = make(), torch.randn(4, 6, 50)
    flat = layer(x.view(24, 50))
    torch.testing.assert_close(layer(x), flat.view(4, 6, 70), rtol=0, atol=0)
    torch.testing.assert_close(layer(x[1, 2]), flat[8], rtol=0, atol=0)
    torch.testing.assert_close(layer(x.transpose(0, 1)), flat.view(4, 6, 70).transpose(0, 1), rtol=0, atol=0)
    wide = torch.randn(5, 200)
    torch.testing.assert_close(layer(wide[:, 30:80]), layer(wide[:, 30:80].contiguous()), rtol=0, atol=0)


def test_many_python_threads_share_a_layer_from_its_first_call():
    layer, x = make(300, 500, block_size=64), torch.randn(7, 300)
    with torch.no_grad():
        want = copy.deepcopy(layer)(x)
    results = []

    def work():
        with torch.no_grad():
            for _ in range(20):
                results.append(layer(x))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 120
    for result in results:
        torch.testing.assert_close(result, want, rtol=0, atol=0)


@torch.no_grad()
def test_no_memory_growth_over_many_calls():
    def resident() -> int:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    layer, x, batch = make(), torch.randn(1, 50), torch.randn(9, 50)
    for _ in range(500):
        layer(x), layer(batch)
    before = resident()
    for _ in range(5000):
        layer(x), layer(batch)
    assert resident() - before < 4 << 20
