"""A kind of gate is one class: registered from outside of the package, it works wherever a kind is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.gates import Gate, gate_kinds, make_gate, register_gate
from blockgate.gates.registry import GATE_KINDS
from blockgate.grid import BlockGrid, open_blocks
from blockgate.ops import topk_gates
from blockgate.spec import GateSpec
from tests.helpers import raises_blockgate


class StrongestGate(Gate):
    """Opens the k blocks with the largest scores, sign and all, each with the value 1."""

    kind = "strongest"

    def count_open(self, sparsity):
        return open_blocks(sparsity, self.grid.num_blocks)

    def forward(self, x):
        values, indices = topk_gates(torch.exp(self.scores(x)), self.open_blocks, normalise="none")
        return torch.ones_like(values) + 0 * values, indices


@pytest.fixture
def strongest(monkeypatch):
    monkeypatch.setattr("blockgate.gates.registry.GATE_KINDS", dict(GATE_KINDS))
    return register_gate(StrongestGate)


def test_a_kind_from_outside_works_everywhere(strongest, tmp_path):
    assert "strongest" in gate_kinds()

    def dense():
        return nn.ModuleDict({"fc": nn.Linear(32, 32), "lstm": nn.LSTM(32, 32)})

    model = dense()
    bg.sparsify_(model, block_size=8, gate="strongest", sparsity=0.75, filter_fn=lambda *_: True)
    assert isinstance(model["fc"].gate, strongest)
    x = torch.randn(5, 3, 32)
    with bg.record_gates(model) as record:
        y, _ = model["lstm"](model["fc"](x))
    y.sum().backward()
    assert sum(record.distribution()["fc"][:3]) == pytest.approx(1)
    assert bg.summary(model).to_dict()
    with bg.inspect.gate_losses(model) as losses:
        model["fc"](x)
    assert losses.balance() > 0

    model.eval()
    bg.save_pretrained(model, tmp_path)
    loaded = bg.load_pretrained(tmp_path, dense).eval()
    packed = bg.pack(model)
    bg.set_sparsity(model, 0.5)
    bg.set_sparsity(model, 0.75)
    with torch.no_grad():
        want = model["fc"](x)
        torch.testing.assert_close(loaded["fc"](x), want)
        torch.testing.assert_close(packed["fc"](x), want)
        assert bg.explain(model["fc"], x).layers[0].why == "this kind of gate has no native code"
    assert loaded["fc"].spec == model["fc"].spec


def test_names_are_given_once(strongest):
    assert register_gate(strongest) is strongest

    class Other(StrongestGate):
        pass

    with raises_blockgate("register_gate: expected a name that is free, got 'strongest'"):
        register_gate(Other)


def test_a_subclass_is_not_taken_for_the_kind_that_native_code_computes():
    topk = GATE_KINDS["topk"]

    class Reversed(topk):
        def scores(self, x):
            return -super().scores(x)

    layer = bg.DynamicSparseLinear(32, 32, block_size=8).eval()
    layer.gate = Reversed(layer.grid, layer.spec)
    x = torch.randn(3, 32)
    with torch.no_grad():
        opened = layer.gates(x)
        want = torch.einsum("rij,rijab->ria", opened, blocks_of(layer, x)).flatten(1) + layer.bias
        torch.testing.assert_close(layer(x), want)


def blocks_of(layer, x):
    """The product of every block with its part of x, (rows, out_blocks, in_blocks, 8, 1)."""
    weight = layer.weight.view(4, 8, 4, 8)
    return torch.einsum("iajb,rjb->rija", weight, x.view(-1, 4, 8)).unsqueeze(-1)


def test_a_spec_decides_shapes_and_rule():
    spec = GateSpec(gate="topk", block_size=(4, 8), key_size=5, key_offset=2, gate_hidden=3)
    gate = make_gate(spec, spec.grid(16, 32))
    assert gate.spec == spec
    assert gate.rule == make_gate(GateSpec.from_json(spec.to_json()), spec.grid(16, 32)).rule
    with raises_blockgate("spec: expected options that keep the kind, the blocks and the shapes of the gate"):
        gate.spec = GateSpec(gate="topk", block_size=(4, 8), key_size=6, gate_hidden=None)
    assert gate.spec == spec
    for change in ({"gate_hidden": 4}, {"key_size": 9}, {"block_size": 2}, {"gate": "sigmoid"}):
        with raises_blockgate("spec: expected options that keep"):
            gate.spec = replace(spec, **change)
        assert gate.spec == spec
    gate.spec = replace(spec, gate="eq1", sparsity=0.75)
    assert (gate.normalise, gate.select, gate.target_sparsity) == ("mean", "global", 0.75)


def test_a_bad_spec_changes_nothing():
    gate = make_gate(GateSpec(gate="sigmoid", sparsity=0.0, block_size=4), BlockGrid(8, 8, 4))
    before = gate.spec
    for change, message in (
        ({"normalise": "mean"}, "normalise and select: expected neither with gate='sigmoid'"),
        ({"key_size": 2, "key_offset": 1, "sparsity": 0.5}, "sparsity: expected 0 with gate='sigmoid', got 0.5"),
    ):
        with raises_blockgate(message):
            gate.spec = replace(before, **change)
        assert (gate.spec, gate.key_offset) == (before, 0)


def test_a_kind_may_build_on_another(monkeypatch):
    monkeypatch.setattr("blockgate.gates.registry.GATE_KINDS", dict(GATE_KINDS))

    class Mine(GATE_KINDS["topk"]):
        kind = "mine"

    register_gate(Mine)
    assert set(gate_kinds()) == {*GATE_KINDS, "mine"}
    assert type(bg.DynamicSparseLinear(8, 8, block_size=2, gate="mine").gate) is Mine


def test_heads_are_counted_by_the_first_sparsity(tmp_path):
    model = nn.Sequential(bg.DynamicSparseLinear(8, 8, block_size=2, gate="softmax_sum", sparsity=0.5))
    model[0].sparsity = 0.75
    assert model[0].spec.sparsity == 0.75
    model[0].gate.spec = model[0].spec
    assert model[0].sparsity == 0.75
    bg.save_pretrained(model, tmp_path)
    loaded = bg.load_pretrained(tmp_path, nn.Sequential(nn.Linear(8, 8)))
    assert (loaded[0].gate.heads, loaded[0].sparsity) == (8, 0.75)


def test_gates_of_one_layer_may_have_sparsities_of_their_own(tmp_path):
    model = nn.ModuleDict({"lstm": bg.DynamicSparseLSTM(16, 16, block_size=4)})
    bg.set_sparsity(model, {"lstm.gate_ih_l0": 0.75, "*": 0.5})
    bg.save_pretrained(model, tmp_path)
    loaded = bg.load_pretrained(tmp_path, nn.ModuleDict({"lstm": nn.LSTM(16, 16)}))
    assert [gate.target_sparsity for gate in loaded["lstm"]._gates()] == [0.75, 0.5]
