"""The packed copy behind inference is never stale: every way to change a layer shows in the very next call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.gates.sigmoid import SigmoidGate
from blockgate.ops import native
from blockgate.spec import GateSpec
from tests.runtime.test_fused import make, unfused

pytestmark = pytest.mark.skipif(native.unavailable_reason() is not None, reason="native kernels are not built")


@torch.no_grad()
def change_optimizer(layer):
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.SGD(layer.parameters(), lr=0.1).step()


@torch.no_grad()
def fused_sgd(weight):
    """Torch's own fused step, called without an optimizer."""
    numbers = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0}
    torch._fused_sgd_(
        [weight], [torch.ones_like(weight)], [], nesterov=False, maximize=False, is_first_step=False, **numbers
    )


def change_fused_optimizer(layer):
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1, fused=True)  # raises no version counter
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def change_fused_step(layer):
    fused_sgd(layer.weight)


def change_fused_step_of_a_view(layer):
    fused_sgd(layer.weight.detach())  # with a version counter of its own


@torch.inference_mode()
def change_fused_step_in_inference_mode(layer):
    fused_sgd(layer.weight)


@torch.no_grad()
def change_fused_adam_step(layer):
    zeros, step = [torch.zeros_like(layer.weight) for _ in range(2)], torch.tensor(1.0)
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    torch._fused_adam_(
        [layer.weight], [torch.ones_like(layer.weight)], [zeros[0]], [zeros[1]], [], [step],
        amsgrad=False, maximize=False, **numbers,
    )  # fmt: skip


@torch.no_grad()
def change_in_place(layer):
    layer.weight[0] += 1


@torch.no_grad()
def change_gate(layer):
    layer.gate.weight.mul_(-1)


def change_loaded(layer):
    layer.load_state_dict(make().state_dict())


def change_assigned(layer):
    layer.load_state_dict(make().state_dict(), assign=True)


def change_parameter(layer):
    layer.weight = nn.Parameter(torch.randn_like(layer.weight))


def change_dtype_and_back(layer):
    layer.bfloat16().float()


def change_sparsity(layer):
    layer.sparsity = 0.9


def change_data(layer):
    layer.weight.data = torch.randn_like(layer.weight)


def change_data_again_and_again(layer):
    for _ in range(200):  # the freed memory of one may become that of the next
        layer.weight.data = torch.randn_like(layer.weight)


def change_swapped(layer):
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.randn_like(layer.weight)))


def change_rule(layer):
    layer.gate.spec = replace(layer.gate.spec, near_dense=True)


def change_key(layer):
    layer.gate.spec = replace(layer.gate.spec, key_offset=0)
    layer.gate = bg.DynamicSparseLinear(50, 70, block_size=16, key_size=7).gate


def change_gate_kind(layer):
    layer.gate = SigmoidGate(layer.grid, GateSpec(sparsity=0))


def change_bias(layer):
    with torch.no_grad():
        layer.bias += 1
        layer.gate.bias += 1


CHANGES = [value for name, value in list(globals().items()) if name.startswith("change_")]


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_the_packed_copy_is_never_stale(change):
    layer, x = make(), torch.randn(3, 50)
    before = layer(x)
    change(layer)
    after = layer(x)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, unfused(layer, x), rtol=0, atol=0)


@torch.no_grad()
def test_edits_that_leave_no_trace_need_repack():
    layer, x = make(), torch.randn(3, 50)
    layer(x)
    layer.weight.data[0] += 1
    layer.repack()
    torch.testing.assert_close(layer(x), unfused(layer, x), rtol=0, atol=0)


@torch.no_grad()
def test_renewed_copies_give_the_old_memory_back():
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    layer, x = make(512, 512, block_size=64), torch.randn(1, 512)  # a packed copy takes 1 MiB
    for _ in range(200):
        layer.weight.mul_(1.0)
        layer(x)
    before = resident()
    for _ in range(400):
        layer.weight.mul_(1.0)
        layer(x)
    # Huge pages and malloc's holes make some noise; what was kept would be 400 MiB.
    assert resident() - before < 40 << 20
