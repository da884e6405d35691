"""Packed layers follow what they were made from: every change that torch can see shows in the very next call."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import blockgate as bg
from blockgate.ops import native
from tests.helpers import raises_blockgate

pytestmark = pytest.mark.skipif(native.unavailable_reason() is not None, reason="native kernels are not built")


def layer(seed=0):
    torch.manual_seed(seed)
    return bg.pack(bg.DynamicSparseLinear(48, 48, block_size=8, sparsity=0.5), "int8")


def lstm(seed=0):
    torch.manual_seed(seed)
    return bg.pack(bg.DynamicSparseLSTM(16, 16, 2, block_size=4, sparsity=0.5), "int8")


class Turned(nn.Module):
    def forward(self, x):
        return x.flip(0)


def load_gate(packed):
    packed.gate.load_state_dict(layer(1).gate.state_dict())


def load_gate_without_sparsity(packed):
    state = layer(1).gate.state_dict()
    del state["sparsity"]
    packed.gate.load_state_dict(state)


def assign_gate(packed):
    packed.gate.load_state_dict(layer(1).gate.state_dict(), assign=True)


def load_blocks(packed):
    packed.packed.load_state_dict(layer(1).packed.state_dict(), assign=True)


def exchange_blocks(packed):
    packed.packed.blocks = layer(1).packed.blocks


def exchange_gate_weight(packed):
    packed.gate.weight = nn.Parameter(layer(1).gate.weight)


@torch.no_grad()
def edit_gate(packed):
    packed.gate.weight.neg_()
    packed.repack()


@torch.no_grad()
def edit_bias(packed):
    packed.bias.add_(1)


@torch.no_grad()
def edit_blocks(packed):
    packed.packed.blocks.neg_()


def reset_gate(packed):
    packed.gate.reset_parameters()


def patch_gate(packed):
    forward = packed.gate.forward
    packed.gate.forward = lambda x: forward(-x)


def register_bias(packed):
    packed.register_parameter("bias", nn.Parameter(torch.ones(48), requires_grad=False))


def change_rule(packed):
    packed.gate.spec = replace(packed.spec, near_dense=True)


def choose_among_all(packed):
    packed.gate.spec = replace(packed.spec, select="global")


def parametrize_bias(packed):
    parametrize.register_parametrization(packed, "bias", Turned())


def parametrize_gate(packed):
    parametrize.register_parametrization(packed.gate, "weight", Turned())


def other_memory(packed):
    packed.bias.data = torch.randn(48)


CHANGES = [change for name, change in list(globals().items()) if getattr(change, "__module__", "") == __name__]
CHANGES = [c for c in CHANGES if callable(c) and c not in {layer, lstm, Turned}]


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_the_next_call_sees_every_change(change):
    packed, x = layer(), torch.randn(3, 48)
    before = packed(x)
    change(packed)
    after = packed(x)
    # A copy prepares itself, from what is there now; a parametrized one can't be copied once it is.
    want = packed(x.double()).float() if "parametrize" in change.__name__ else copy.deepcopy(packed)(x)
    torch.testing.assert_close(after, want)
    assert not torch.equal(before, after)


@torch.no_grad()
def test_lstms_see_changes_of_their_matrices():
    packed, x = lstm(), torch.randn(2, 3, 16)
    before = packed(x)[0]
    packed.hh_l1.gate.load_state_dict(lstm(1).hh_l1.gate.state_dict())
    after = packed(x)[0]
    torch.testing.assert_close(after, copy.deepcopy(packed)(x)[0], rtol=0, atol=0)
    assert not torch.equal(before, after)


@torch.no_grad()
def test_a_call_while_weights_are_loaded_is_forgotten():
    packed, x = layer(), torch.randn(3, 48)
    handle = packed.gate.register_load_state_dict_pre_hook(lambda *_: packed(x))
    packed.load_state_dict(layer(1).state_dict())
    handle.remove()
    torch.testing.assert_close(packed(x), layer(1)(x), rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("make", [layer, lstm])
def test_memory_that_moves_is_followed(make):
    # A model that is put into a queue moves to shared memory, in place.
    packed = make()
    x = torch.randn(2, 3, 16) if make is lstm else torch.randn(3, 48)
    want = packed(x)
    packed.share_memory()
    got = packed(x)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_what_is_no_tensor():
    with raises_blockgate("input: expected a dense floating tensor, got 'list'"):
        layer()([1.0])


def test_made_in_inference_mode():
    with torch.inference_mode():
        packed, x = layer(), torch.randn(3, 48)
        want = packed(x)
        assert bg.explain(packed, x).layers[0].path == "fused native"
    torch.testing.assert_close(layer()(x.clone()), want, rtol=0, atol=0)
