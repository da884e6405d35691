from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockgate.find import check_patterns, first_match, matches
from tests.helpers import raises_blockgate

NAMES = ["encoder.layers.0.linear1", "encoder.layers.0.linear2", "head"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*", NAMES),
        ("head", ["head"]),
        ("encoder", NAMES[:2]),
        ("encoder.*", NAMES[:2]),
        ("encoder.layers.?", NAMES[:2]),
        ("*.linear1", NAMES[:1]),
        ("*.linear[2-9]", NAMES[1:2]),
        ("linear1", []),
        ("Head", []),
        ("enc", []),
    ],
)
def test_what_a_pattern_matches(pattern, expected):
    assert [name for name in NAMES if matches(pattern, name)] == expected


@given(st.lists(st.text("ab1_", min_size=1), min_size=1, max_size=4))
def test_a_full_name_matches_itself_and_what_is_inside(parts):
    name = ".".join(parts)
    assert matches(name, name)
    assert matches(name, f"{name}.gate")
    assert not matches(name, f"x{name}")
    assert not matches(f"{name}.gate", name)


def test_the_first_pattern_that_matches_counts():
    patterns = {"*.linear1": 1, "encoder": 2}
    assert first_match(patterns, ["encoder.linear1"]) == ("*.linear1", 1)
    assert first_match(patterns, ["encoder.linear2"]) == ("encoder", 2)
    assert first_match(patterns, ["other.x", "encoder.linear2"]) == ("encoder", 2)
    assert first_match(patterns, ["head"]) is None


def test_a_pattern_that_does_nothing_is_an_error():
    layers = [[name] for name in NAMES]
    check_patterns({"head": 1, "*": 2}, layers)
    with raises_blockgate("name pattern: expected one that matches a layer: 'encoder.layers.0.linear1', "):
        check_patterns({"head": 1, "haed": 2}, layers)
    with raises_blockgate("name pattern: expected one that matches before another does, got 'head'. Put it before the"):
        check_patterns({"*": 1, "head": 2}, layers)
    with raises_blockgate("name pattern: expected a string, got 3"):
        check_patterns({3: 1}, layers)
    with raises_blockgate("'0', '1', '10', '11', "):
        check_patterns({"z": 1}, [[name] for name in sorted(map(str, range(20)))])
