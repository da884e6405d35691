"""Whole models through `sparsify_`: they run their gates, stay close, train, pack and copy."""

from __future__ import annotations

import copy
import io
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.gates import Gate
from blockgate.runtime.packed import PackedLinear
from tests.model_zoo import EACH, TiedLM, encoder, run, sequence

if TYPE_CHECKING:
    from collections.abc import Callable


def convert(model: nn.Module, **options: Any) -> bg.convert.SparsifyReport:
    return bg.sparsify_(model, **{"block_size": 16, **options})


def gate_calls(model: nn.Module, call: Callable[[], Any]) -> dict[str, int]:
    """How often each gate ran. A hooked gate takes the separate ops, so a call counts whichever path it would take."""
    calls = {name: 0 for name, module in model.named_modules() if isinstance(module, Gate)}

    def count(name):
        calls[name] += 1

    hooks = [model.get_submodule(n).register_forward_hook(lambda *_, n=n: count(n)) for n in calls]
    call()
    for hook in hooks:
        hook.remove()
    return calls


@EACH
def test_the_model_stays_close_and_runs_every_gate(case):
    model, example = case.make().train(), case.example()
    report = convert(model, example_input=example)
    assert len(report.converted) == case.gated
    assert 0 < report.relative_difference < 0.05
    assert report.not_run == ()
    assert all(gate.target_sparsity == 0.5 for gate in model.modules() if isinstance(gate, Gate))
    assert all(module.training for module in model.modules())
    for mode in (True, False):
        model.train(mode)
        with torch.set_grad_enabled(mode):
            calls = gate_calls(model, lambda: run(model, example))
        assert len(calls) >= case.gated
        assert all(count > 0 for count in calls.values())


@EACH
def test_a_few_steps_lower_the_loss(case):
    model, example = case.make().eval(), case.example()  # eval: without dropout the loss must fall
    convert(model, sparsity=0.25)
    target = run(model, example).detach() + 1
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(8):
        loss = (run(model, example) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    assert all(gate.weight.grad.count_nonzero() for gate in model.modules() if isinstance(gate, Gate))


@EACH
def test_it_packs_and_runs_packed_layers(case):
    model, example = case.make().eval(), case.example()
    convert(model)
    packed = bg.pack(model)
    ran = []
    for module in packed.modules():
        if isinstance(module, PackedLinear):
            module.register_forward_hook(lambda module, *_: ran.append(module))
    with torch.no_grad():
        torch.testing.assert_close(run(packed, example), run(model, example))
    assert set(ran) == {module for module in packed.modules() if isinstance(module, PackedLinear)}


@EACH
def test_copies_and_checkpoints(case):
    model, example = case.make().eval(), case.example()
    convert(model, sparsity=0.75)
    with torch.no_grad():
        want = run(model, example)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            torch.testing.assert_close(run(twin, example), want)
        other = case.make().eval()
        convert(other, sparsity=0.0)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file, weights_only=True))
        torch.testing.assert_close(run(other, example), want)


@EACH
def test_dense_checkpoints_load_both_ways(case):
    dense, model = case.make(), case.make()
    convert(model)
    result = model.load_state_dict(dense.state_dict(), strict=False)
    assert result.unexpected_keys == []
    assert all("gate" in key for key in result.missing_keys)
    back = dense.load_state_dict(model.state_dict(), strict=False)
    assert back.missing_keys == []
    assert all("gate" in key for key in back.unexpected_keys)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_torch_s_encoder_gives_the_same_in_eval_with_and_without_gradients(norm_first, padded):
    model, x = encoder(batch_first=True, norm_first=norm_first).eval(), sequence()
    mask = torch.arange(6).expand(3, 6) >= torch.tensor([[4], [6], [3]]) if padded else None
    report = convert(model, example_input={"src": x, "src_key_padding_mask": mask}, sparsity=0.75)
    assert report.relative_difference < 0.05
    want = model(x, src_key_padding_mask=mask)
    with torch.no_grad():
        y = model(x, src_key_padding_mask=mask)
        assert all(gate_calls(model, lambda: model(x, src_key_padding_mask=mask)).values())
    torch.testing.assert_close(y, want)


def test_shortcuts_stay_on_where_nothing_was_gated():
    model = nn.ModuleDict({"plain": encoder(batch_first=True), "gated": encoder(batch_first=True)})
    convert(model, options={"plain": None})
    assert model["plain"].layers[0].activation_relu_or_gelu == 1
    assert model["plain"].use_nested_tensor
    assert model["gated"].layers[0].activation_relu_or_gelu == 0
    assert not model["gated"].use_nested_tensor


def test_ties_and_shared_modules_survive():
    model = TiedLM()
    convert(model)
    assert model.decoder.weight is model.embedding.weight
    assert model.again is model.block
    names = [name for name, _ in model.named_parameters()]
    assert len(names) == len(set(names))
    assert not any(name.startswith("again") for name in names)
