"""Numbers at the ends of their types, and sizes at the ends of theirs."""

from __future__ import annotations

import pytest
import torch

import blockgate as bg
from blockgate.errors import InvalidInputError
from blockgate.spec import GateSpec
from tests.helpers import raises_blockgate

ops = torch.ops.blockgate


@pytest.mark.parametrize("scale", [1e-320, 1e-200, 1e-120, 1e120, 1e200, 1e307])
@pytest.mark.parametrize("rule", ["rms", "mean", "none", "margin", "margin_near_dense"])
def test_scores_of_any_size(scale, rule):
    scores = torch.randn(5, 24, dtype=torch.float64).abs() * scale
    for selection in ([3, 2], [12, 2], [4, 1]):
        gates, indices = ops.topk_gates(scores, selection, rule)
        expected, places = ops.topk_gates_reference(scores, selection, rule)
        torch.testing.assert_close(gates, expected, rtol=1e-12 if scale > 1e-300 else 1e-2, atol=0)
        assert torch.equal(indices, places)
        if rule in {"rms", "margin", "margin_near_dense"}:
            torch.testing.assert_close(gates.square().sum(1) / 24, torch.ones(5, dtype=torch.float64))
        if 1e-300 < scale < 1e300:
            grad = torch.randn_like(gates)
            found = ops.topk_gates_backward(grad, scores, gates, indices, selection, rule)
            wanted = ops.topk_gates_backward_reference(grad, scores, gates, indices, selection, rule)
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12 * float(wanted.abs().max()))


def test_sigmoid_gates_far_below_zero():
    layer = bg.DynamicSparseLinear(8, 8, block_size=4, gate="sigmoid", sparsity=0)
    with torch.no_grad():
        layer.gate.bias.fill_(-500)
        gates = layer.gates(torch.randn(3, 8))
    torch.testing.assert_close(gates.mean((1, 2)), torch.ones(3))


@pytest.mark.parametrize("size", [2**63 - 5, 2**62, 2**40 + 1, 2**64, (2**63 - 5, 16), (16, 2**50)])
def test_blocks_of_absurd_size_are_refused(size):
    with raises_blockgate("at most 2^40", InvalidInputError):
        bg.DynamicSparseLinear(8, 8, block_size=size)
    with raises_blockgate("at most 2^40", InvalidInputError):
        GateSpec(block_size=size)


def test_one_large_block_is_the_whole_weight():
    layer, x = bg.DynamicSparseLinear(8, 8, block_size=2**40), torch.randn(3, 8)
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), expected)
    for name in ("int8", "int4"):
        torch.testing.assert_close(bg.pack(layer, name)(x), expected.detach(), rtol=0.2, atol=0.2)


@pytest.mark.parametrize("block", [[2**63 - 5, 8], [8, 2**63 - 5], [2**41, 2**41]])
def test_native_code_refuses_them_too(block):
    x, weight = torch.randn(2, 8), torch.randn(8, 8)
    gates, indices = torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"at most 2\^40"):
        ops.gated_linear(x, weight, None, gates, indices, block)
    with pytest.raises(RuntimeError, match=r"at most 2\^40"):
        ops.pack_blocks(weight, block, "int8")


def prepare(key, open_blocks=1):
    """A layer of 8 inputs with a gate over 4 blocks, prepared and run once."""
    weight = torch.randn(8, 8)
    blocks, scale = ops.pack_blocks(weight, [4, 4], "float32")
    gate_weight, _ = ops.pack_blocks(torch.randn(4, min(max(key[1], 1), 8)), [4, min(max(key[1], 1), 8)], "float32")
    handle = ops.prepare_dynamic_linear(
        blocks, scale, None, [8, 8, 4, 4], "float32", gate_weight, None, None, None, key, 1, "rms"
    )
    try:
        return ops.run_prepared_linear(torch.randn(2, 8), handle, open_blocks)
    finally:
        ops.release_prepared_linear(handle)


@pytest.mark.parametrize("key", [[1, 8], [2**63 - 4, 8], [8, 1], [2**63 - 1, 2**63 - 1], [-1, 4], [0, 0]])
def test_keys_outside_of_the_input_are_refused(key):
    assert prepare([2, 6]).shape == (2, 8)
    with pytest.raises(RuntimeError, match="key: expected a part of the 8 input features"):
        prepare(key)


def test_more_open_blocks_than_there_are_is_refused():
    with pytest.raises(RuntimeError, match="open_blocks: expected 1 to 4"):
        prepare([0, 8], 5)
    with pytest.raises(RuntimeError, match="open_blocks: expected 1 to 4"):
        ops.topk_gates(torch.randn(2, 8), [5, 2], "rms")


@pytest.mark.parametrize("index", [4, -1, 2**62])
def test_a_block_that_is_not_there_is_refused(index):
    gates, indices = torch.ones(2, 1), torch.tensor([[0], [index]])
    with pytest.raises(RuntimeError, match=r"block indices in \[0, 4\)"):
        ops.gated_linear(torch.randn(2, 8), torch.randn(8, 8), None, gates, indices, [4, 4])
