from __future__ import annotations

import subprocess
import sys

import torch
from torch import nn

import blockgate as bg
from blockgate.layers import DynamicSparseConv1D
from tests.helpers import raises_blockgate


def test_it_computes_what_the_linear_layer_computes_with_its_weight_transposed():
    layer = DynamicSparseConv1D(24, 40, gate="topk", block_size=8, sparsity=0.6)
    assert layer.weight.shape == (24, 40)
    linear = bg.DynamicSparseLinear(24, 40, gate="topk", block_size=8, sparsity=0.6)
    linear.load_state_dict({**layer.state_dict(), "weight": layer.weight.t()})
    x = torch.randn(5, 24)
    y, want = layer(x), linear(x)
    torch.testing.assert_close(y, want)
    y.square().sum().backward()
    want.square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, linear.weight.grad.t())
    torch.testing.assert_close(layer.gate.weight.grad, linear.gate.weight.grad)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), want)


def test_from_dense_shares_parameters_and_refuses_other_layers():
    from transformers.pytorch_utils import Conv1D

    conv = Conv1D(40, 24).eval()
    layer = DynamicSparseConv1D.from_dense(conv, block_size=8, sparsity=0.0)
    assert layer.weight is conv.weight
    assert layer.bias is conv.bias
    assert not layer.training
    x = torch.randn(5, 24)
    assert (layer(x) - conv(x)).norm() < 0.05 * conv(x).norm()
    with raises_blockgate("from_dense: expected a Conv1D of transformers, got 'Linear'"):
        DynamicSparseConv1D.from_dense(nn.Linear(24, 40))


def test_dense_ones_pack():
    from transformers.pytorch_utils import Conv1D

    conv, x = Conv1D(40, 24), torch.randn(5, 24)
    with torch.no_grad():
        torch.testing.assert_close(bg.pack(conv)(x), conv(x))


def test_transformers_is_never_imported_for_it():
    code = """
import sys, torch, blockgate as bg
model = torch.nn.Sequential(torch.nn.Linear(128, 128))
bg.sparsify_(model, block_size=64)
bg.pack(model)
assert "transformers" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
