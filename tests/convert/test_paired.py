"""MLPs of models that people have, with one gate for all their layers."""

from __future__ import annotations

import copy
import importlib
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import blockgate as bg
from blockgate.convert import regroup
from blockgate.convert.pairs import find_pairs
from blockgate.integrations.onnx import exportable
from blockgate.runtime.paired import PairedLinear
from tests.helpers import assert_close, raises_blockgate
from tests.model_zoo import run
from tests.paired_zoo import BLOCK, EACH, HIDDEN, in_a_pair, made, mlps, sequential


def unit_gates(model):
    """Gates of 1 everywhere: what is left is the dense model."""
    for mlp in mlps(model).values():
        mlp.gate.register_forward_hook(lambda *call: (torch.ones_like(call[-1][0]), call[-1][1]))


@EACH
def test_with_unit_gates_the_model_is_the_dense_one(name):
    model, example, names = made(name)
    before = run(model, example)
    keys, parameters = set(model.state_dict()), [*model.parameters()]
    only_pairs = {n: c for n, c in copy.deepcopy(model).named_modules() if n in names}
    assert len(only_pairs) in {0, len(names)}
    report = bg.sparsify_(model, paired=BLOCK, sparsity=0.0, filter_fn=lambda _, n: in_a_pair(name, n))
    assert sorted(mlps(model)) == sorted(names)
    assert sorted(layer.name for layer in report.converted) == sorted(names)
    # Weights keep their names and are the same objects.
    assert keys <= set(model.state_dict())
    held = {id(p) for p in model.parameters()}
    assert all(id(p) in held for p in parameters)
    unit_gates(model)
    torch.testing.assert_close(run(model, example), before, rtol=1e-4, atol=1e-5)


@EACH
def test_half_closed_models_run_train_save_and_load(name, tmp_path):
    model, example, names = made(name)
    report = bg.sparsify_(model, paired=BLOCK, sparsity=0.5, example_input=example)
    assert not report.not_run
    assert report.relative_difference < 0.1
    model.train()
    run(model, example).square().mean().backward()
    for mlp in mlps(model).values():
        assert all(p.grad is not None for part in mlp.parts() for p in part.parameters())
        assert mlp.gate.weight.grad is not None
    model.eval()
    with torch.no_grad():
        expected = run(model, example)
        assert torch.equal(run(copy.deepcopy(model), example), expected)
        assert torch.equal(run(pickle.loads(pickle.dumps(model)), example), expected)
    bg.set_sparsity(model, 0.25)
    bg.save_pretrained(model, tmp_path)
    with torch.no_grad():
        expected = run(model, example)
        dense, _, _ = made(name, seed=1)
        assert torch.equal(run(bg.load_pretrained(tmp_path, dense), example), expected)
        # A model that is gated already takes the weights too.
        assert torch.equal(run(bg.load_pretrained(tmp_path, dense), example), expected)
    assert sorted(mlps(dense)) == sorted(names)


@EACH
def test_regrouped_models_compute_what_they_did(name):
    model, example, names = made(name)
    state = copy.deepcopy(model.state_dict())
    before = run(model, example)
    shares = regroup(model, [example] * 2, block=BLOCK)
    assert sorted(shares) == sorted(names)
    torch.testing.assert_close(run(model, example), before, rtol=1e-4, atol=1e-5)
    assert any(not torch.equal(state[key], value) for key, value in model.state_dict().items())


@EACH
def test_reports_count_both_matrices(name):
    model, example, names = made(name)
    bg.sparsify_(model, paired=BLOCK, sparsity=0.5, filter_fn=lambda _, n: in_a_pair(name, n))
    for whole in (model, bg.pack(model)):
        lines = {line.name: line for line in bg.summary(whole, example).layers}
        for n in names:
            mlp = mlps(model)[n]
            size = sum(part.weight.numel() for part in mlp.parts())
            assert lines[n].macs_dense == size
            assert lines[n].parameters == size + sum(p.bias.numel() for p in mlp.parts() if p.bias is not None)
            assert lines[n].measured_density == pytest.approx(0.5)
            assert lines[n].macs_now == pytest.approx(0.5 * size + mlp.gate.count_macs())
    with bg.record_gates(model) as record:
        run(model, example)
    assert set(names) <= set(record.gates)
    assert set(names) <= {layer.name for layer in bg.sensitivity(model, [example]).layers}


@EACH
def test_exportable_models_give_the_same(name):
    model, example, _ = made(name)
    bg.sparsify_(model, paired=BLOCK, sparsity=0.5)
    with torch.no_grad():
        torch.testing.assert_close(run(exportable(model), example), run(model, example), rtol=1e-4, atol=1e-5)


def test_regrouping_finds_channels_that_act_together():
    torch.manual_seed(0)
    # Eight groups of channels, each active for inputs of one class, in a random order.
    model = nn.Sequential(nn.Linear(8, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, 8))
    group = torch.randperm(HIDDEN) % 8
    with torch.no_grad():
        model[0].weight.copy_(F.one_hot(group, 8) * (1 + torch.rand(HIDDEN, 1)))
    x = torch.eye(8)[torch.randint(8, (256,))] + 0.01 * torch.randn(256, 8)
    before = model(x)
    ((low, high),) = regroup(model, [x], block=8).values()
    assert low < 0.92
    assert high > 0.99
    assert_close(model(x), before)
    owners = model[0].weight.detach().argmax(1).view(8, 8)
    assert (owners == owners[:, :1]).all()


def test_regrouping_keeps_ragged_blocks_and_needs_inputs():
    model = nn.Sequential(nn.Linear(8, 50), nn.GELU(), nn.Linear(50, 8))
    x = torch.randn(64, 8)
    before, rows = model(x), model[0].weight.detach().clone()
    regroup(model, [x], block=16)
    assert_close(model(x), before)
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, model[0].weight.tolist()))
    with raises_blockgate("regroup: expected a dense model with MLPs"):
        regroup(model, x)
    with raises_blockgate("regroup: expected a dense model with MLPs"):
        regroup(nn.Linear(3, 3), [x])


def test_calibrated_gates_open_the_blocks_that_matter():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 16))
    with torch.no_grad():
        # Blocks follow single inputs: a linear gate can know which are large.
        model[0].weight.copy_(torch.eye(16).repeat_interleave(8, 0))
    dense = copy.deepcopy(model)
    bg.sparsify_(model, paired=8, sparsity=0.5, gate="topk", normalise="none", key_size=None)
    batches = [torch.randn(256, 16).relu() for _ in range(4)]
    x = torch.randn(64, 16).relu()

    def error():
        with torch.no_grad():
            return float((model(x) - dense(x)).norm() / dense(x).norm())

    fresh = error()
    predicted = bg.calibrate(model, batches)
    assert set(predicted) == {"1"}
    assert predicted["1"] > 0.5
    assert error() < 0.5 * fresh


def test_what_is_not_free_stays_with_the_usual_rules():
    model = sequential()
    report = bg.sparsify_(model, paired=BLOCK, block_size=8, options={"0": None})
    by_name = {layer.name: layer for layer in report.layers}
    assert not by_name["0"].converted
    assert by_name["3"].converted
    assert by_name["5"].kind == "4 + 6"
    again = bg.sparsify_(model, paired=BLOCK, options={"0": None})
    assert {layer.reason for layer in again.layers} == {"left out by options['0']", "already gated"}
    # Too few channels for two blocks.
    assert not mlps_after(sequential(), paired=96)
    # A layer that another module calls too.
    shared = sequential()
    both = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared[4], nn.Identity())})
    assert [pair.name for pair in find_pairs(both)] == ["a.1"]
    # An activation that is not known.
    assert not find_pairs(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)))


def mlps_after(model, **options):
    bg.sparsify_(model, block_size=8, **options)
    return mlps(model)


@pytest.mark.parametrize("name", ["sequential", "gpt2", "llama"])
def test_converted_models_compile(name):
    model, example, _ = made(name)
    bg.sparsify_(model, paired=BLOCK, sparsity=0.5)
    with torch.no_grad():
        expected = run(model, example)
        torch.testing.assert_close(run(torch.compile(model, backend="eager"), example), expected)


def test_a_module_that_only_looks_like_one_is_left():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_fc, self.c_proj, self.act = nn.Linear(8, 32), nn.Linear(32, 8), nn.GELU()

        def forward(self, x):
            return x + self.c_proj(self.act(self.c_fc(x)))

    assert not find_pairs(nn.Sequential(Looks()))


@pytest.mark.parametrize("around", ["activation", "down", "up"])
def test_a_module_that_goes_around_a_part_is_left(around):
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)
            self.act_fn = nn.SiLU()

        def forward(self, x):
            gate = self.gate_proj(x)
            gate = F.silu(gate) if around == "activation" else self.act_fn(gate)
            up = F.linear(x, self.up_proj.weight, self.up_proj.bias) if around == "up" else self.up_proj(x)
            if around == "down":
                return F.linear(gate * up, self.down_proj.weight, self.down_proj.bias)
            return self.down_proj(gate * up)

    model = nn.Sequential(Around())
    assert not find_pairs(model)
    assert type(model[0].act_fn) is nn.SiLU
    assert not any(layer._forward_hooks for layer in model.modules())


def test_options_of_the_up_projection_count():
    model, _, names = made("gpt2")
    options = {"transformer.h.0.mlp.c_fc": {"sparsity": 0.75, "key_size": 16}}
    bg.sparsify_(model, paired=BLOCK, options=options, gate="topk", normalise="none")
    first, second = (mlps(model)[name] for name in names)
    assert (first.sparsity, first.spec.key_size, first.spec.gate) == (0.75, 16, "topk")
    assert (second.sparsity, second.spec.key_size) == (0.5, "auto")
    with raises_blockgate("layer '1': gate and select: expected a gate that chooses among all hidden blocks"):
        bg.sparsify_(sequential(), paired=BLOCK, gate="norm")
    with raises_blockgate("paired: expected a positive int"):
        bg.sparsify_(sequential(), paired=0)


class FailsAt(nn.Module):
    """A model whose second call fails: the one after its layers were replaced."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("second call")
        return self.inner(x)


def test_an_error_leaves_the_model_as_it_was():
    model, example, _ = made("transformer")
    model = FailsAt(model.encoder)
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(RuntimeError, match="second call"):
        bg.sparsify_(model, paired=BLOCK, example_input=example[0])
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert model.inner.layers[0].activation is F.gelu
    assert model(example[0]).isfinite().all()


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_transformers_own_checkpoints_keep_paired_gates(name, tmp_path):
    importlib.import_module("blockgate.integrations.huggingface")
    model, example, _ = made(name)
    bg.sparsify_(model, paired=BLOCK, sparsity=0.5)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(run(again, example), run(model, example))
    assert all(isinstance(part, PairedLinear) for mlp in mlps(again).values() for part in mlp.parts())


def test_gates_alone_go_beside_the_dense_weights(tmp_path):
    model, example, _ = made("llama")
    dense = copy.deepcopy(model)
    bg.sparsify_(model, paired=BLOCK, sparsity=0.5)
    bg.save_pretrained(model, tmp_path, gates_only=True)
    with torch.no_grad():
        assert torch.equal(run(bg.load_pretrained(tmp_path, dense), example), run(model, example))
