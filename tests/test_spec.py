"""The options of a gated layer, once: defaults, checks, JSON, and the same words everywhere."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import blockgate as bg
from blockgate.spec import GateOptions, GateSpec
from tests.helpers import raises_blockgate

SPECS = st.builds(
    GateSpec,
    block_size=st.one_of(st.integers(1, 200), st.tuples(st.integers(1, 99), st.integers(1, 99))),
    sparsity=st.floats(0, 0.99),
    key_size=st.sampled_from([..., None, 1, 32]),
    key_offset=st.integers(0, 9),
    gate_hidden=st.sampled_from([None, 1, 16]),
    gate=st.sampled_from(["topk", "eq1", "softmax_sum", "another"]),
    normalise=st.sampled_from([None, "mean", "rms", "none"]),
    select=st.sampled_from([None, "global", "per_row"]),
)


@given(SPECS)
def test_json_keeps_everything_but_the_backend(spec):
    arrived = json.loads(json.dumps(spec.to_json()))
    assert GateSpec.from_json(arrived) == spec
    assert GateSpec.from_json(replace(spec, backend="reference").to_json()) == spec


def test_keyword_arguments_are_the_fields():
    assert set(GateOptions.__annotations__) == {field.name for field in fields(GateSpec)}
    for name in GateOptions.__annotations__:
        assert f"{name}: " in bg.DynamicSparseLinear.__doc__


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: bg.DynamicSparseLinear(64, 32, **options),
        lambda **options: bg.DynamicSparseLSTM(64, 32, 2, **options),
        lambda **options: bg.layers.DynamicSparseLSTMCell(64, 32, **options),
        lambda **options: bg.DynamicSparseQRNN(64, 32, window=1, **options).filters[0],
    ],
    ids=["linear", "lstm", "cell", "qrnn"],
)
def test_layers_hold_their_spec(make):
    assert make().spec == GateSpec()
    spec = GateSpec(block_size=(8, 4), sparsity=0.75, key_size=16, gate="topk", normalise="mean", backend="reference")
    assert make(spec=spec).spec == spec
    layer = make(spec=spec, sparsity=0.5)
    assert layer.spec == replace(spec, sparsity=0.5)
    bg.set_sparsity(layer, 0.25)
    assert layer.spec == replace(spec, sparsity=0.25)
    assert make(gate="eq1").spec == GateSpec(normalise="mean", select="global")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_sise": 3}, "option: expected one of ('block_size', 'sparsity', "),
        ({"block_size": (1, 2, 3)}, "block_size: expected one int or (out, in), got (1, 2, 3)"),
        ({"sparsity": 1}, "sparsity: expected a number in [0, 1), got 1"),
        ({"gate": 3}, "gate: expected the name of a kind of gate, got 3"),
        ({"normalise": "max"}, "normalise: expected one of ('mean', 'rms', 'none'), got 'max'"),
        ({"select": 3}, "select: expected one of ('global', 'per_row'), got 3"),
        ({"backend": "gpu"}, "backend: expected one of"),
    ],
)
def test_bad_options_are_refused(options, message):
    with raises_blockgate(message):
        GateSpec.of(None, options)
    with raises_blockgate(message):
        bg.DynamicSparseLSTM(8, 8, **options)


def test_the_kind_of_gate_where_none_is_named():
    assert GateSpec().gate == "margin"
    # An option that only topk has says which kind is meant.
    assert GateSpec(normalise="mean").gate == "topk"
    assert GateSpec.of(None, {"normalise": "rms"}).gate == "topk"
    with raises_blockgate("normalise and select: expected neither with gate='margin'"):
        bg.DynamicSparseLinear(8, 8, gate="margin", normalise="rms")
