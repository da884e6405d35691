"""Labels find their rows, and warnings fire when they should and only then."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import blockgate as bg
from tests.helpers import raises_blockgate
from tests.inspect.helpers import inputs, layer_that_opens, run_and_fail

PATTERNS = [[0, 1], [0, 2]]


class StepByStep(nn.Module):
    """A layer called once a step, as the recurrent matrix of an LSTM is. x (T, N, in)."""

    def __init__(self):
        super().__init__()
        self.gate_hh_l0 = layer_that_opens(PATTERNS).gate

    def forward(self, x):
        return [self.gate_hh_l0(step) for step in x]


def test_labels_are_dealt_out_over_steps():
    net = StepByStep()
    x = nn.functional.one_hot(torch.tensor([[0, 1], [1, 1], [0, 0]]), 2).float()
    with bg.record_gates(net) as record:
        with record.labelled(torch.tensor([[0, 1], [1, 1], [0, 0]])):
            net(x)
        with record.labelled([5, 6]):  # a label for each sequence: the same in every step
            net(x)
    counts = {label: c.tolist() for label, c in record.gates["hh_l0"].class_open_counts.items()}
    assert counts == {0: [3, 3, 0, 0], 1: [3, 0, 3, 0], 5: [3, 2, 1, 0], 6: [3, 1, 2, 0]}


@pytest.mark.parametrize(("labels", "message"), [([0], "which sees 3"), ([0, 1, 2, 3], "the rows that gate saw")])
def test_labels_must_fit_the_rows(labels, message):
    layer = layer_that_opens(PATTERNS)
    with bg.record_gates(layer) as record, raises_blockgate(message), record.labelled(labels):
        layer(inputs(layer, [0, 1, 0]))
    assert not layer.gate._forward_hooks


@pytest.mark.parametrize("labels", [[0.5], [True], [], torch.tensor([1.0]), ["cat"], None])
def test_labels_are_whole_numbers(labels):
    record = bg.record_gates(layer_that_opens(PATTERNS))
    with raises_blockgate("labels"), record.labelled(labels):
        pass


def test_an_error_inside_is_not_hidden_by_unused_labels():
    layer = layer_that_opens(PATTERNS)
    with bg.record_gates(layer) as record, pytest.raises(ZeroDivisionError), record.labelled([0, 1]):
        run_and_fail(layer, [0])
    with record:
        layer(inputs(layer, [0]))
    assert record.gates["gate"].class_rows == {0: 1}


def warnings_of(patterns, numbers):
    layer = layer_that_opens(patterns)
    with bg.record_gates(layer) as record:
        layer(inputs(layer, numbers))
    return record.warnings()


def one_of(messages, words):
    return sum(words in message for message in messages) == 1


def test_healthy_gates_get_no_warning():
    layer = layer_that_opens([[0, 1], [1, 2], [2, 3], [3, 0]])
    layer.sparsity = 0.5
    with bg.record_gates(layer) as record:
        layer(inputs(layer, [0, 1, 2, 3] * 20))
    assert record.warnings() == []


def test_a_frozen_gate_is_told():
    messages = warnings_of([[0, 1]], [0] * 100)
    assert one_of(messages, "gate: frozen: two inputs have 100.0% of their open blocks in common")
    assert one_of(messages, "and 0.0% of the blocks depend on the input")
    assert one_of(messages, "2 of 4 blocks never opened in 100 rows")
    # Two patterns that share half their blocks are not frozen; one that is there most of the time is.
    assert not one_of(warnings_of(PATTERNS, [0, 1] * 50), "frozen")
    assert one_of(warnings_of([[0, 1], [2, 3]], [0] * 95 + [1] * 5), "frozen: two inputs have 90")
    # Nor is a gate that opens everything.
    assert warnings_of([[0, 1, 2, 3]], [0] * 100) == []


def test_dead_blocks_are_told():
    assert one_of(warnings_of(PATTERNS, [0, 1] * 50), "gate: 1 of 4 blocks never opened in 100 rows")
    assert not one_of(warnings_of([[0, 1], [2, 3]], [0, 1] * 50), "never opened")


def test_too_few_rows_are_told():
    assert one_of(warnings_of([[0, 1, 2, 3]], [0] * 19), "19 rows are too few")
    assert not one_of(warnings_of([[0, 1, 2, 3]], [0] * 20), "too few")
    assert bg.record_gates(layer_that_opens(PATTERNS)).warnings()[0].startswith("gate: saw no rows")


def test_closed_rows_and_low_density_are_told():
    messages = warnings_of([[0, 1, 2, 3], []], [0, 0, 1] * 20)
    assert one_of(messages, "20 of 60 rows opened no block at all")
    assert one_of(messages, "opens fewer blocks than asked for (66.7% instead of 100.0%). Usually harmless")


def test_findings_name_their_gate_and_kind():
    layer = layer_that_opens([[0, 1, 2, 3], []])
    with bg.record_gates(layer) as record:
        layer(inputs(layer, [0, 0, 1] * 20))
    assert [(found.gate, found.kind) for found in record.findings()] == [
        ("gate", "closed rows"),
        ("gate", "few blocks"),
    ]
    assert record.warnings() == [str(found) for found in record.findings()]


def test_values_that_are_not_finite_are_told():
    layer = layer_that_opens(PATTERNS)
    with torch.no_grad():
        layer.gate.bias[0] = torch.inf
    with bg.record_gates(layer) as record:
        layer(inputs(layer, [0]))
    assert one_of(record.warnings(), "not finite")
    assert record.to_dict()["gates"]["gate"]["value_mean"] is None


@pytest.mark.parametrize("batch_first", [False, True])
def test_labels_of_sequences_in_a_recurrent_layer(batch_first):
    """A label for each step, steps outermost, whatever batch_first says, as the error advises."""
    torch.manual_seed(0)
    lstm = bg.DynamicSparseLSTM(8, 8, batch_first=batch_first, block_size=4, sparsity=0.5, select="global").eval()
    sequences, y, steps = torch.randn(3, 5, 8), torch.tensor([7, 8, 9]), 5

    def record_of(which, labels):
        x = sequences[which]
        with bg.record_gates(lstm) as record, record.labelled(labels):
            lstm(x if batch_first else x.transpose(0, 1))
        return record

    with raises_blockgate("y.repeat(T) for recurrent layers, which go through time first whatever batch_first says"):
        record_of(slice(None), y)
    together = record_of(slice(None), y.repeat(steps))
    for number, label in enumerate(y.tolist()):
        alone = record_of(slice(number, number + 1), [label] * steps)
        for name, gate in together.gates.items():
            assert gate.class_rows[label] == steps
            torch.testing.assert_close(gate.class_open_counts[label], alone.gates[name].class_open_counts[label])
    # Labels dealt out sequence by sequence end up elsewhere: the test can tell.
    wrong = record_of(slice(None), y.repeat_interleave(steps))
    assert any(
        not torch.equal(wrong.gates[name].class_open_counts[7], gate.class_open_counts[7])
        for name, gate in together.gates.items()
    )
