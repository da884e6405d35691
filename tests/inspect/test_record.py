"""Statistics of known decisions, labels, warnings, and hooks that leave nothing behind."""

from __future__ import annotations

import copy
import io
import json

import pytest
import torch
from torch import nn

import blockgate as bg
from tests.helpers import raises_blockgate
from tests.inspect.helpers import GATE_OPTIONS, inputs, layer_that_opens, run_and_fail, small_net

# Block 0 opens for every input, 1 for the first, 2 for the second, 3 for none.
PATTERNS = [[0, 1], [0, 2]]


def recorded(patterns, numbers, labels=None, **options):
    layer = layer_that_opens(patterns)
    with bg.record_gates(layer, **options) as record:
        if labels is None:
            layer(inputs(layer, numbers))
        else:
            with record.labelled(labels):
                layer(inputs(layer, numbers))
    return record


def hooks_of(model):
    return [h for m in model.modules() for h in m._forward_hooks.values()]


def test_counts_of_known_decisions():
    stats = recorded(PATTERNS, [0, 0, 0, 1]).gates["gate"]
    assert stats.rows == 4
    assert stats.open_counts.tolist() == [4, 3, 1, 0]
    assert stats.frequency().tolist() == [[1.0, 0.75], [0.25, 0.0]]
    assert stats.measured_density == 0.5
    assert stats.target_density == 1.0
    assert stats.value_sum.tolist() == [4, 3, 1, 0]
    assert (stats.value_mean, stats.value_std) == (1.0, 0.0)
    assert stats.pair_counts.tolist() == [[4, 3, 1, 0], [3, 3, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]


def test_values_and_their_spread():
    layer = layer_that_opens([[0], [0]])
    with torch.no_grad():
        layer.gate.weight[0, 1] = 4.0  # minus bias 1: a gate of 3
    with bg.record_gates(layer) as record:
        layer(inputs(layer, [0, 1]))
    stats = record.gates["gate"]
    assert (stats.value_mean, stats.value_std) == (2.0, 1.0)
    assert stats.value_square_sum.tolist() == [10, 0, 0, 0]


def test_distribution_of_known_decisions():
    record = recorded(PATTERNS, [0] * 19 + [1])
    # Block 1 is open for 19 of 20 rows, block 2 for 1 of 20: just inside both limits.
    assert record.distribution(0.95) == {"gate": (0.5, 0.0, 0.5)}
    assert record.distribution(0.96) == {"gate": (0.25, 0.5, 0.25)}
    assert record.distribution(0.96)["gate"].input_dependent == 0.5
    assert recorded(PATTERNS, [0] * 9 + [1]).distribution(0.9) == {"gate": (0.5, 0.0, 0.5)}


@pytest.mark.parametrize("threshold", [0.5, 1.1, "0.9"])
def test_bad_threshold(threshold):
    with raises_blockgate("threshold"):
        recorded(PATTERNS, [0]).distribution(threshold)


def test_overlap_of_known_decisions():
    # Rows open {0, 1}, {0, 1}, {0, 2}, {0, 2}: of 6 pairs 2 share both blocks and 4 share one.
    record = recorded(PATTERNS, [0, 0, 1, 1], labels=[7, 7, 3, 3])
    overlap = record.overlap()["gate"]
    assert overlap.inputs == pytest.approx((2 * 1.0 + 4 * 0.5) / 6)
    assert overlap.within_classes == 1.0
    assert overlap.between_classes == 0.5
    stats = record.gates["gate"]
    assert stats.labels == [3, 7]
    assert stats.class_overlap().tolist() == [[1.0, 0.5], [0.5, 1.0]]
    assert stats.frequency(7).tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_nothing_to_compare():
    overlap = recorded(PATTERNS, [0], labels=[5]).overlap()["gate"]
    assert overlap == (None, None, None)
    with raises_blockgate("rows labelled 4"):
        recorded(PATTERNS, [0], labels=[5]).gates["gate"].frequency(4)


def test_many_batches_add_up_and_take_no_memory():
    layer = layer_that_opens(PATTERNS)

    def numbers_held(record):
        kept = record.gates["gate"]
        tensors = [v for v in vars(kept).values() if isinstance(v, torch.Tensor)] + list(
            kept.class_open_counts.values()
        )
        return sum(t.numel() for t in tensors)

    with bg.record_gates(layer, trace=3) as record:
        held = []
        for _ in range(50):
            with record.labelled([0, 1, 1, 0]):
                layer(inputs(layer, [0, 1, 1, 1]))
            held.append(numbers_held(record))
    assert record.gates["gate"].rows == 200
    assert record.gates["gate"].open_counts.tolist() == [200, 50, 150, 0]
    assert record.gates["gate"].class_rows == {0: 100, 1: 100}
    assert set(held) == {held[0]}


def test_a_batch_without_rows_adds_nothing():
    layer = layer_that_opens(PATTERNS)
    with bg.record_gates(layer) as record:
        layer(torch.zeros(0, 2))
    assert record.gates["gate"].rows == 0
    assert record.distribution() == {}


def test_rows_in_chunks_give_the_same_sums(monkeypatch):
    layer = layer_that_opens(PATTERNS)
    rows = inputs(layer, [0, 1, 1, 0, 1, 0, 0])

    def measure():
        with bg.record_gates(layer, trace=2) as record, record.labelled(range(7)):
            layer(rows)
        stats = record.gates["gate"]
        return record.to_dict(), stats.trace.tolist(), stats.pair_counts.tolist()

    whole = measure()
    monkeypatch.setattr("blockgate.inspect.statistics.CHUNK_CELLS", 12)
    assert measure() == whole


def test_pairs_are_counted_up_to_a_size_unless_asked():
    small, large = bg.DynamicSparseLinear(32, 32, block_size=1), bg.DynamicSparseLinear(33, 32, block_size=1)
    assert bg.record_gates(small).gates["gate"].pair_counts is not None
    assert bg.record_gates(large).gates["gate"].pair_counts is None
    assert bg.record_gates(large, coactivation=True).gates["gate"].pair_counts is not None
    assert bg.record_gates(small, coactivation=False).gates["gate"].pair_counts is None


def test_trace_keeps_the_last_rows_in_order():
    layer = layer_that_opens(PATTERNS)
    with bg.record_gates(layer, trace=3) as record:
        layer(inputs(layer, [0, 0]))
        layer(inputs(layer, [1, 0]))
    assert record.gates["gate"].trace.tolist() == [[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 0]]
    assert recorded(PATTERNS, [0]).gates["gate"].trace.shape == (0, 4)
    with raises_blockgate("trace"):
        bg.record_gates(layer, trace=-1)


@pytest.mark.parametrize("options", GATE_OPTIONS.values(), ids=GATE_OPTIONS)
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad", "inference_mode"])
def test_agrees_with_what_the_layers_say_of_their_gates(options, mode):
    net = small_net(**options).train(mode == "train")
    x = torch.randn(40, 6)
    with torch.inference_mode(mode == "inference_mode"), torch.set_grad_enabled(mode in {"train", "eval"}):
        with bg.record_gates(net) as record:
            y = net(x)
        hidden = net[:2](x)
        gates = {"2": net[2].gates(hidden), "4": net[4].gates(net[2:4](hidden))}
    assert y.shape == (40, 3)
    for name, expected in gates.items():
        stats = record.gates[name]
        assert torch.equal(stats.open_counts, (expected != 0).sum(0).flatten())
        torch.testing.assert_close(stats.value_sum, expected.detach().double().sum(0).flatten())


def test_a_record_goes_on_after_inference_mode():
    layer = layer_that_opens(PATTERNS)
    with torch.inference_mode():
        record = bg.record_gates(layer, trace=4)
        for _ in range(2):
            with record, record.labelled([0, 1]):
                layer(inputs(layer, [0, 1]))
    stats = record.gates["gate"]
    kept = [stats.open_counts, stats.value_sum, stats.trace, *stats.class_open_counts.values()]
    assert not any(t.is_inference() for t in kept)
    with record, record.labelled([0, 1]):
        layer(inputs(layer, [0, 1]))
    assert stats.open_counts.tolist() == [6, 3, 3, 0]
    assert stats.class_rows == {0: 3, 1: 3}


def test_recording_changes_no_result():
    net = small_net().eval()
    x = torch.randn(5, 6)
    with torch.no_grad():
        before = net(x)
        with bg.record_gates(net):
            during = net(x)
    torch.testing.assert_close(during, before)
    net.train()
    with bg.record_gates(net):
        net(x).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_packed_models(dtype):
    net = small_net().eval()
    packed = bg.pack(net, dtype)
    x = torch.randn(30, 6)
    with bg.record_gates(packed) as record:
        packed(x)
    with bg.record_gates(net) as expected:
        net(x)
    assert record.gates["2"].rows == 30
    if dtype is torch.float32:
        assert torch.equal(record.gates["2"].open_counts, expected.gates["2"].open_counts)


def test_hooks_go_even_after_an_error_and_entering_twice_counts_once():
    layer = layer_that_opens(PATTERNS)
    record = bg.record_gates(layer)
    with pytest.raises(ZeroDivisionError), record:
        run_and_fail(layer, [0])
    assert not hooks_of(layer)
    with record, record:
        with bg.record_gates(layer) as other:
            layer(inputs(layer, [1]))
        layer(inputs(layer, [1]))
    layer(inputs(layer, [1]))
    assert not hooks_of(layer)
    assert record.gates["gate"].open_counts.tolist() == [3, 1, 2, 0]
    assert other.gates["gate"].rows == 1


def test_copies_made_while_recording_are_not_recorded_and_lose_their_hooks():
    net = small_net().eval()
    x = torch.randn(4, 6)
    with bg.record_gates(net) as record:
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        copies = [copy.deepcopy(net), bg.pack(net), torch.load(file, weights_only=False)]
        for made in copies:
            made(x)
            assert not hooks_of(made)
        assert record.gates["2"].rows == 0
        net(x)
    assert record.gates["2"].rows == 4


def test_a_layer_used_twice_counts_both_uses():
    layer = bg.DynamicSparseLinear(8, 8, block_size=4)
    net = nn.Sequential(layer, nn.ReLU(), layer)
    with bg.record_gates(net) as record:
        net(torch.randn(5, 8))
    assert list(record.gates) == ["0"]
    assert record.gates["0"].rows == 10


def test_a_compiled_model_runs_uncompiled_for_the_record():
    net = small_net().eval()
    compiled = torch.compile(net, backend="eager")
    x = torch.randn(3, 6)
    with torch.no_grad():
        compiled(x)
        with bg.record_gates(compiled) as record:
            compiled(x)
        compiled(x)
    assert [stats.rows for stats in record.gates.values()] == [3, 3]


def test_autocast_doesn_t_round_the_counts():
    layer = bg.DynamicSparseLinear(4, 4, block_size=4, sparsity=0.0)
    nn.init.ones_(layer.gate.bias)
    nn.init.zeros_(layer.gate.weight)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), bg.record_gates(layer) as record:
        layer(torch.randn(1001, 4))
    assert record.gates["gate"].pair_counts.tolist() == [[1001]]


def test_json_round_trip():
    record = recorded(PATTERNS, [0, 1], labels=[0, 1])
    data = record.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["gates"]["gate"]["classes"] == {
        "0": {"rows": 1, "open_counts": [1, 1, 0, 0]},
        "1": {"rows": 1, "open_counts": [1, 0, 1, 0]},
    }
    empty = bg.record_gates(small_net()).to_dict()
    assert json.loads(json.dumps(empty, allow_nan=False)) == empty


def test_models_without_gates():
    for model in (nn.Linear(2, 2), None):
        with raises_blockgate("model"):
            bg.record_gates(model)


def test_meta_tensors_have_no_decisions():
    layer = bg.DynamicSparseLinear(8, 8, block_size=4, device="meta")
    with raises_blockgate("gate values"), bg.record_gates(layer):
        layer(torch.randn(2, 8, device="meta"))
