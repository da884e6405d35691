"""Warnings about gates in a run: each once, with the remedy, and none about what the run chose itself."""

from __future__ import annotations

import blockgate as bg
from blockgate.lab.training.gate_health import GateWarnings
from tests.inspect.helpers import inputs, layer_that_opens

FEW = [[0, 1, 2, 3], []]


def seen(patterns, numbers):
    layer = layer_that_opens(patterns)
    with bg.record_gates(layer) as record:
        layer(inputs(layer, numbers))
    return record


def test_the_same_thing_is_said_once_even_if_its_numbers_change():
    warnings = GateWarnings(reviving=True)
    first = warnings.new(seen(FEW, [0, 0, 1] * 20))
    assert len(first) == 2
    assert "lower the gates' learning rate" in first[1]
    assert warnings.new(seen(FEW, [0, 1, 1] * 20)) == []
    # Something else about the same gate is news.
    (frozen,) = warnings.new(seen([[0, 1]], [0] * 100))
    assert "frozen" in frozen


def test_too_few_rows_are_no_concern_of_the_user():
    assert any("too few" in message for message in seen([[0, 1, 2, 3]], [0] * 19).warnings())
    assert GateWarnings(reviving=False).new(seen([[0, 1, 2, 3]], [0] * 19)) == []


def test_dead_blocks_are_told_unless_they_are_being_revived():
    record = seen([[0, 1], [0, 2]], [0, 1] * 50)
    assert not any("never opened" in told for told in GateWarnings(reviving=True).new(record))
    (told,) = (told for told in GateWarnings(reviving=False).new(record) if "never opened" in told)
    assert "--optimizer.revive" in told
