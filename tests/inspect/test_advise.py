"""`bg.advise`: what it measures, what it concludes, and what `sparsify_` makes of it. No times are checked."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import types
from dataclasses import replace

import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.errors import InvalidInputError
from blockgate.inspect.advice import advising, conclusions, training
from blockgate.inspect.advice.conclusions import Measured, draw_advice
from blockgate.inspect.advice.measure import SPARSITIES, TORCH, Times, Way, more_ways
from blockgate.inspect.advice.store import Store
from blockgate.inspect.advice.training import with_training
from blockgate.layers import QRNN, DynamicSparseLinear, DynamicSparseLSTM
from blockgate.ops import native

# Times are of no interest here.
quick_advice = functools.partial(bg.advise, seconds=0.2)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(128, 256)
        self.inner = nn.Linear(256, 512)
        self.unused = nn.Linear(512, 512)
        self.tags = nn.Linear(512, 5)

    def forward(self, x):
        return self.tags(torch.relu(self.inner(self.rnn(x)[0])))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10))


def stack() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(3)))


# Model, example, and for every layer: its weights, its calls, whether it could be gated.
GOLDEN = {
    "network": (
        network,
        torch.zeros(3, 256),
        {
            "0": ("1024x256", "1 of 3x256", True),
            "2": ("256x1024", "1 of 3x1024", True),
            "4": ("10x256", "1 of 3x256", False),
        },
    ),
    "stack": (stack, torch.zeros(1, 512), {f"{i}.0": ("512x512", "1 of 1x512", True) for i in range(3)}),
    "tagger": (
        Tagger,
        (torch.zeros(2, 1, 128),),
        {
            "rnn": ("1024x128, 1024x256", "1 of 2x1x128", True),
            "inner": ("512x256", "1 of 2x1x256", True),
            "unused": ("512x512", "none", False),
            "tags": ("5x512", "1 of 2x1x512", False),
        },
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_structure(name, tmp_path):
    make, example, golden = GOLDEN[name]
    advice = quick_advice(make(), example, formats=["float32"], store=tmp_path / "times.json")
    assert [layer.name for layer in advice.layers] == list(golden)
    for layer in advice.layers:
        weights, calls, gateable = golden[layer.name]
        assert (layer.matrices, layer.calls) == (weights, calls)
        assert set(layer.gated) == (set(SPARSITIES) if gateable else set())
        assert (layer.torch is None) == (calls == "none")
        assert layer.gate <= gateable
    assert set(advice.gated) == set(SPARSITIES)
    assert json.loads(json.dumps(advice.to_dict()))["format"] == "float32"
    assert "whole model" in str(advice)


def test_the_model_is_left_as_it_was():
    model = network().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    quick_advice(model, torch.zeros(1, 256), formats=["float32"], store=None)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_layers_of_one_shape_are_measured_once_and_kept(tmp_path, monkeypatch):
    asked = []
    real = advising.measure
    monkeypatch.setattr(advising, "measure", lambda *args, **kw: asked.append(args[1]) or real(*args, **kw))
    seen = []
    file = tmp_path / "times.json"
    for _ in range(2):
        advice = quick_advice(
            stack(), torch.zeros(1, 512), formats=["float32"], store=file, progress=lambda *of: seen.append(of)
        )
    assert asked == [(1, 512)] * 2  # all blocks at one sparsity, then the best at the others; nothing the second time
    assert seen == [(0, 1), (1, 1)] * 2
    assert "*.*" in str(advice)
    assert "(3)" in str(advice)


def measured(name: str, torch_ms: float, packed_ms: float, gated_ms: float, **more: str) -> Measured:
    spec = {"block_size": (256, 16), "key_size": 64}
    seconds = {TORCH: torch_ms, Way(format="int8"): packed_ms}
    seconds |= {Way(format="int8", sparsity=level, **spec): gated_ms for level in SPARSITIES}
    return Measured(name=name, kind="Linear", matrices="", calls="", seconds=seconds, leave=more.get("leave", ""))


def test_conclusions():
    layers = [
        measured("pays", 10.0, 4.0, 2.0),
        measured("too-little", 10.0, 4.0, 3.9),
        measured("torch-is-best", 1.0, 4.0, 2.0),
        measured("head", 10.0, 4.0, 2.0, leave="output head"),
    ]
    advice = draw_advice(layers, ["int8"], model=40.0, sparsity=0.75, cold=True)
    assert [layer.gate for layer in advice.layers] == [True, False, False, False]
    assert [layer.pack for layer in advice.layers] == [True, True, False, True]
    # 9 of the 40 are spent elsewhere; packed dense layers take 4 + 4 + 1 + 4.
    assert advice.packed == pytest.approx(9 + 13)
    assert advice.gated[0.75] == pytest.approx(9 + 11)
    assert advice.options()["pays"] == {"block_size": (256, 16), "key_size": 64, "sparsity": 0.75}
    assert advice.options()["head"] is None
    assert not advice.packs(nn.Linear(1, 1), "torch-is-best")


def test_the_fastest_format_wins():
    layer = measured("a", 10.0, 4.0, 2.0)
    layer.seconds[Way(format="float32")] = 8.0
    assert draw_advice([layer], ["float32", "int8"], model=10.0, sparsity=0.5, cold=False).format == "int8"


def test_other_sparsities_are_measured_for_the_best_way_of_each_format():
    slow = Way(format="int8", sparsity=0.75, block_size=(128, 128), key_size=64)
    fast = Way(format="int8", sparsity=0.75, block_size=(256, 16), key_size=64)
    found = more_ways({TORCH: 1.0, slow: 2.0, fast: 1.0})
    assert {(way.block_size, way.sparsity) for way in found} == {((256, 16), 0.5), ((256, 16), 0.9)}


def test_sparsify_follows_the_advice():
    model = Tagger()
    layers = [
        measured("rnn", 10, 4, 2),
        measured("inner", 10, 4, 4),
        measured("unused", 9, 4, 2),
        measured("tags", 1, 4, 9),
    ]
    report = bg.sparsify_(model, draw_advice(layers, ["int8"], model=40.0, sparsity=0.75, cold=True))
    assert isinstance(model.rnn, DynamicSparseLSTM)
    assert isinstance(model.unused, DynamicSparseLinear)
    assert model.unused.spec.sparsity == 0.75
    assert model.unused.spec.block_size == (256, 16)
    assert type(model.inner) is nn.Linear
    assert next(layer.reason for layer in report.layers if layer.name == "inner") == "left dense by the advice"


def test_layers_to_gate_are_timed_in_training_too(tmp_path):
    model = Tagger()
    layers = [measured("rnn", 10, 4, 2), measured("inner", 10, 4, 2), measured("unused", 9, 4, 4)]
    advice = draw_advice(layers, ["int8"], model=40.0, sparsity=0.75, cold=True)
    store = Store(tmp_path / "times.json")
    known = [("rnn", model.rnn, "a", 128), ("inner", model.inner, "b", 256), ("unused", model.unused, "c", 512)]
    advice = with_training(advice, known, store)
    rnn, inner, unused = advice.layers
    assert set(rnn.training) == set(inner.training) == {"torch", "0", "0.75"}
    assert unused.training == {}
    assert all(p.grad is None for p in model.parameters())
    # Kept by the shape of the input: 16 steps of 16 sequences, and 256 rows.
    assert list(store.known[store.machine]) == ["a, training with 16 x 16 x 128", "b, training with 256 x 256"]
    assert with_training(advice, known, Store(tmp_path / "times.json")) == advice


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(512, 512), (256, 512)),
        (nn.LSTMCell(64, 256), (256, 64)),  # which has no packed form
        (nn.LSTM(64, 256, batch_first=True), (16, 16, 64)),
        (QRNN(64, 256, 2, window=(2, 1)), (16, 16, 64)),  # the first matrix reads two steps
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_step_of_training_is_timed_for_every_kind_of_layer(layer, shape, monkeypatch):
    asked = []
    real = training.measure_training

    def see(layer, shape, ways):
        asked.append(shape)
        return real(layer, shape, ways)

    monkeypatch.setattr(training, "measure_training", see)
    monkeypatch.setattr(conclusions, "LEAST_GAIN", -1e9)  # every layer is worth gates
    model = nn.Sequential(layer)
    example = torch.zeros(1, shape[-1]) if len(shape) == 2 else torch.zeros(1, 1, shape[-1])
    options = {"formats": ["float32"], "store": None, "seconds": 0.1}
    candidates = advising.find_candidates(model)
    monkeypatch.setattr(advising, "find_candidates", lambda _: [replace(c, is_last_linear=False) for c in candidates])
    (advised,) = bg.advise(model, example, **options).layers
    assert advised.gate
    assert asked == [shape]
    assert all(seconds > 0 for seconds in advised.training.values())


def test_what_speaks_against_the_advice_is_told():
    def advised(format_name="int8", at_half=2.0, **training):
        layer = measured("a", 10.0, 4.0, 2.0)
        spec = {"block_size": (256, 16), "key_size": 64}
        layer.seconds[Way(format="int8", sparsity=0.5, **spec)] = at_half
        layer.seconds.update({replace(way, format=format_name): s for way, s in layer.seconds.items() if way.format})
        advice = draw_advice([layer], [format_name], model=10.0, sparsity=0.75, cold=False)
        return replace(advice, layers=tuple(replace(one, training=training) for one in advice.layers))

    assert advised(**{"torch": 2.0, "0": 1.0, "0.75": 1.0}).warnings == ()
    slow = advised(at_half=5.0, **{"torch": 1.0, "0": 2.0, "0.75": 1.25})
    assert slow.warnings == (
        "Gated is slower than the dense model at a sparsity of 50% (0.80x).",
        "Training is slower at the start of a ramp (sparsity 0): the gated layers run at 0.50x the speed of torch's.",
        "Training is slower at the end: the gated layers run at 0.80x the speed of torch's.",
    )
    assert str(slow).count("\nWarning: ") == 3
    assert len(slow.to_dict()["warnings"]) == 3
    (rounds,) = advised("int4").warnings
    assert "int4 rounds more" in rounds


def test_all_formats_are_measured_by_default(tmp_path):
    store = tmp_path / "times.json"
    quick_advice(nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)), torch.zeros(1, 256), store=store)
    times = next(iter(Store(store).known.values()))
    ways = set(next(iter(times.values())))
    assert {f"packed {name}" for name in ("float32", "bfloat16", "float16", "int8", "int8a8", "int4")} <= ways


def test_options_come_before_the_advice():
    model = network()
    layers = [measured("0", 10, 4, 2), measured("2", 10, 4, 2), measured("4", 1, 4, 9)]
    advice = draw_advice(layers, ["int8"], model=40.0, sparsity=0.75, cold=True)
    bg.sparsify_(model, advice, options={"0": None})
    assert type(model[0]) is nn.Linear
    assert isinstance(model[2], DynamicSparseLinear)


def test_advice_for_another_model_is_refused():
    advice = draw_advice([measured("other", 10, 4, 2)], ["int8"], model=40.0, sparsity=0.75, cold=True)
    with pytest.raises(InvalidInputError, match="layers it doesn't have: other"):
        bg.sparsify_(network(), advice)
    with pytest.raises(InvalidInputError, match=r"what bg\.advise returns"):
        bg.sparsify_(network(), 0.9)


def test_advice_to_gate_nothing_says_so():
    advice = draw_advice([measured("0", 1, 4, 9)], ["int8"], model=40.0, sparsity=0.75, cold=True)
    assert "Gate nothing" in str(advice)
    with pytest.raises(InvalidInputError, match="left dense by the advice"):
        bg.sparsify_(nn.Sequential(nn.Linear(512, 512)), advice)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparsity": 0.6}, "one of"),
        ({"formats": "int8"}, "names of formats"),
        ({"formats": ["int3"]}, "int3"),
        ({"model": nn.ReLU()}, "layers that can be gated"),
        ({"model": 3}, "an nn.Module"),
        ({"model": network().double()}, "float32 on the CPU"),
    ],
)
def test_mistakes(change, message):
    arguments = {"model": network(), "example_input": torch.zeros(1, 256), "store": None} | change
    with pytest.raises(InvalidInputError, match=message):
        quick_advice(**arguments)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 3}'])
def test_a_broken_store_is_measured_again(tmp_path, content):
    file = tmp_path / "times.json"
    file.write_text(content)
    store = Store(file)
    assert store.get("layer", [TORCH]) == {}
    store.put("layer", {TORCH: Times(1.0, 2.0)})
    assert Store(file).get("layer", [TORCH]) == {TORCH: Times(1.0, 2.0)}


def test_times_of_other_kernels_are_not_used(tmp_path, monkeypatch):
    file = tmp_path / "times.json"
    Store(file).put("layer", {TORCH: Times(1.0, 2.0)})
    monkeypatch.setattr(native, "build_digest", lambda: "another")
    assert Store(file).get("layer", [TORCH]) == {}


def test_the_digest_is_that_of_the_file_with_the_kernels(tmp_path, monkeypatch):
    if native.unavailable_reason() is None:
        assert len(native.build_digest()) == 12
    built = tmp_path / "_C.so"
    built.write_bytes(b"kernels")
    monkeypatch.setitem(sys.modules, "blockgate._C", types.SimpleNamespace(__file__=str(built)))
    assert native.build_digest.__wrapped__() == hashlib.sha256(b"kernels").hexdigest()[:12]


def test_times_of_another_machine_are_not_used(tmp_path, monkeypatch):
    file = tmp_path / "times.json"
    Store(file).put("layer", {TORCH: Times(1.0, 2.0)})
    monkeypatch.setattr("blockgate.inspect.advice.store.cpu_name", lambda: "another")
    assert Store(file).get("layer", [TORCH]) == {}
