"""`explain` names a reason for every refusal of the fast path; each is brought about here."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, prune
from torch.utils._python_dispatch import TorchDispatchMode

import blockgate as bg
from blockgate.ops import native
from blockgate.runtime import plan
from blockgate.runtime.plan import FUSED, OPS, REFERENCE, STEPS
from tests.helpers import raises_blockgate

pytestmark = pytest.mark.skipif(native.unavailable_reason() is not None, reason="native kernels are not built")

OPTIONS = {"block_size": 8, "sparsity": 0.5}


class Plain(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def linear(**options):
    return bg.DynamicSparseLinear(32, 32, **{**OPTIONS, **options}).eval()


def lstm(**options):
    return bg.DynamicSparseLSTM(16, 16, 2, **{**OPTIONS, **options}).eval()


def rows():
    return torch.randn(3, 32)


def steps():
    return torch.randn(4, 3, 16)


def the_row(model, x, *, gradients=False):
    """The only row of the table; with gradients off unless they are asked for."""
    with nullcontext() if gradients else torch.no_grad():
        (row,) = bg.explain(model, x).layers
    return row


def check(model, x, path, reason, **options):
    row = the_row(model, x, **options)
    assert (row.path, row.why, row.remedy) == (path, *reason)
    return row


def test_nothing_to_explain_on_the_fast_path():
    packed = bg.pack(linear()), bg.pack(nn.Linear(32, 32), torch.int8)
    for model, x in [(linear(), rows()), (lstm(), steps()), (bg.pack(lstm()), steps()), *((p, rows()) for p in packed)]:
        check(model, x, FUSED, ("", ""))


def test_gradients():
    check(linear(), rows(), OPS, plan.GRADIENTS, gradients=True)
    check(lstm(), steps(), OPS, plan.GRADIENTS, gradients=True)
    # A packed layer has none, so it doesn't matter that they are on.
    check(bg.pack(linear()), rows(), FUSED, ("", ""), gradients=True)
    check(bg.pack(lstm()), steps(), FUSED, ("", ""), gradients=True)


@pytest.mark.parametrize("model", [linear(), bg.pack(linear(), torch.int8), bg.pack(nn.Linear(32, 32))], ids=type)
def test_packed_and_unpacked_layers_refuse_inputs_alike(model):
    check(model, rows().as_subclass(Subclass), OPS, plan.SUBCLASS)
    with torch.autocast("cpu", torch.bfloat16):
        check(model, rows(), OPS, plan.AUTOCAST)
    with Plain():
        check(model, rows(), OPS, plan.WATCHED)
    with forward_ad.dual_level():
        check(model, rows(), OPS, plan.FORWARD_MODE)


def test_type_of_the_input():
    check(linear().double(), rows().double(), OPS, plan.INPUT_TYPE)
    check(bg.pack(linear()), rows().double(), OPS, plan.INPUT_TYPE)


def test_device_of_the_input():
    check(linear(device="meta"), rows().to("meta"), REFERENCE, plan.INPUT_DEVICE)


def test_layout_of_the_input():
    assert plan.input_refusal(rows().to_sparse()) is plan.INPUT_LAYOUT


def test_tracing(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert linear().plan(rows()) == plan.Plan(OPS, *plan.GRADIENTS)
    with torch.no_grad():
        assert linear().plan(rows()) == plan.Plan(OPS, *plan.TRACING)


def test_no_kernels(monkeypatch):
    model = linear()
    monkeypatch.setattr(native, "_reason", "not built")
    check(model, rows(), REFERENCE, plan.NO_KERNELS)


def test_backend():
    check(linear(backend="reference"), rows(), REFERENCE, plan.BACKEND)
    check(lstm(backend="reference"), steps(), REFERENCE, plan.BACKEND)


def test_kind_of_gate():
    check(linear(gate="softmax_sum"), rows(), OPS, plan.GATE_KIND)
    check(lstm(gate="softmax_sum"), steps(), STEPS, plan.GATE_KIND)
    check(bg.pack(linear(gate="softmax_sum")), rows(), OPS, plan.GATE_KIND)


def test_norm_gates_are_packed():
    columns = linear(gate="norm", block_size=(32, 1))
    check(columns, rows(), OPS, plan.NORM_COLUMNS)
    assert "bg.pack" in plan.NORM_COLUMNS.remedy
    check(bg.pack(columns), rows(), FUSED, ("", ""))
    wide = linear(gate="norm", block_size=(32, 2))
    check(wide, rows(), OPS, plan.NORM_BLOCKS)
    check(bg.pack(wide), rows(), OPS, plan.NORM_BLOCKS)


def test_hooks_of_the_gate():
    for model, x, path in [(linear(), rows(), OPS), (bg.pack(linear()), rows(), OPS), (lstm(), steps(), STEPS)]:
        with bg.record_gates(model):
            check(model, x, path, plan.GATE_HOOKS)
        check(model, x, FUSED, ("", ""))


def test_a_gate_that_counts_in_training():
    for model, x in [(linear(gate="margin"), rows()), (lstm(gate="margin"), steps())]:
        check(model, x, FUSED, ("", ""))
        check(model.train(), x, OPS, plan.GATE_OBSERVES)
        check(bg.pack(model), x, FUSED, ("", ""))


def test_a_patched_gate_is_called():
    for name in ("forward", "scores"):
        model, called = linear(), []
        original = getattr(model.gate, name)
        setattr(model.gate, name, lambda x, original=original, called=called: called.append(1) or original(x))
        check(model, rows(), OPS, plan.GATE_PATCHED)
        assert called


def test_a_parametrized_gate():
    model = linear()
    parametrizations.weight_norm(model.gate)
    check(model, rows(), OPS, plan.GATE_WEIGHTS)
    model = linear()
    prune.l1_unstructured(model.gate, "weight", 0.3)
    check(model, rows(), OPS, plan.GATE_WEIGHTS)


def test_a_parametrized_or_pruned_layer():
    check(parametrizations.weight_norm(linear()), rows(), OPS, plan.WEIGHTS)
    check(prune.l1_unstructured(linear(), "bias", 0.3), rows(), OPS, plan.WEIGHTS)
    check(parametrizations.weight_norm(lstm(), "weight_hh_l0"), steps(), OPS, plan.WEIGHTS)
    check(prune.l1_unstructured(bg.pack(linear()), "bias", 0.3), rows(), OPS, plan.WEIGHTS)


def test_a_shadowed_weight():
    model = bg.layers.weight_drop_(linear(gate="topk"), "weight", 0.5).train()
    # Hooks of explain come after those of the layer, so they see what the call sees.
    check(model, rows(), OPS, plan.SHADOWED)
    check(model.eval(), rows(), FUSED, ("", ""))


def test_type_of_the_weights():
    check(linear().bfloat16(), rows().bfloat16(), OPS, plan.INPUT_TYPE)
    model = linear()
    model.weight = nn.Parameter(model.weight.detach().t().contiguous().t())
    check(model, rows(), OPS, plan.WEIGHT_TYPE)


def test_weights_made_in_inference_mode():
    with torch.inference_mode():
        model = linear()
    check(model, rows(), OPS, plan.INFERENCE_WEIGHTS)


def test_type_of_the_state():
    state = (torch.zeros(2, 3, 16).double(), torch.zeros(2, 3, 16).double())
    for model, path in [(lstm(), OPS), (bg.pack(lstm()), STEPS)]:
        assert the_state_row(model, steps(), state) == plan.Plan(path, *plan.STATE_TYPE)


@torch.no_grad()
def the_state_row(model, x, state):
    return model.plan(x, state)


def test_dropout_between_layers():
    model = lstm(dropout=0.5).train()
    check(model, steps(), OPS, plan.LAYER_DROPOUT)
    check(model.eval(), steps(), FUSED, ("", ""))


def test_hooks_inside_of_a_packed_lstm():
    packed = bg.pack(lstm())
    with ExitStack() as stack:
        stack.callback(packed.ih_l1.register_forward_hook(lambda *_: None).remove)
        check(packed, steps(), STEPS, plan.LAYER_HOOKS)
    check(packed, steps(), FUSED, ("", ""))


def test_gates_of_a_sharded_model():
    model = linear()
    model.gate._is_fsdp_managed_module = True  # the mark that fully_shard leaves
    check(model, rows(), OPS, plan.SHARDED)


def test_triton_asked_for_by_name():
    model = linear()
    model.gate._backend = "triton"  # the constructor refuses it where there is no GPU
    assert plan.gate_refusal(model.gate) is plan.TRITON


def test_every_refusal_has_a_test_here():
    from pathlib import Path

    refusals = [name for name, value in vars(plan).items() if isinstance(value, plan.Refusal)]
    text = "".join(file.read_text() for file in Path(__file__).parent.glob("test_explain*.py"))
    assert len(refusals) == 30
    assert [name for name in refusals if f"plan.{name}" not in text] == []


def test_a_whole_model_and_what_it_does_not_call():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused, self.twice = linear(), linear(), bg.pack(linear())

        def forward(self, x, *, scale):
            return self.twice(self.twice(self.used(x)).double()) * scale

    with torch.no_grad():
        shown = bg.explain(Half(), {"x": rows(), "scale": 2})
    paths = {row.layer: (row.path, row.why) for row in shown.layers}
    assert paths == {
        "used": (FUSED, ""),
        "unused": ("not run", "the model did not call it"),
        "twice": (OPS, "the input is not float32"),
    }
    text = str(shown)
    assert text.splitlines()[0].split("  ")[0] == "layer"
    assert text.endswith("1 of 3 layers ran in one native call")
    assert shown.to_dict()["layers"][0]["path"] == FUSED
    assert repr(shown) == text


def test_what_can_not_be_explained():
    with raises_blockgate("explain: expected a model with gated or packed layers, got 'Linear'"):
        bg.explain(nn.Linear(3, 3), torch.zeros(3))
    with raises_blockgate("explain: expected an nn.Module, got 'int'"):
        bg.explain(3, torch.zeros(3))


def test_a_changed_rule_shows_in_the_very_next_call():
    model, x = linear(), rows()
    with torch.no_grad():
        before = model(x)
        model.gate.spec = replace(model.spec, near_dense=True)
        after = model(x)
        model.gate.spec = replace(model.spec, backend="reference")
        torch.testing.assert_close(after, model(x))
    assert not torch.equal(before, after)
