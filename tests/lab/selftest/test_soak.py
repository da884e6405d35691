"""The soak, for some seconds, and what it calls growth."""

from __future__ import annotations

import sys

import pytest

from blockgate.lab.selftest.soak import grown, soak


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("gated", [True, False])
def test_some_seconds_of_everything(gated):
    result = soak(3, gated=gated)
    assert result["faults"] == []
    assert result["counts"]["decoded"] > 0
    assert result["counts"]["compared"] > 0


def test_growth_is_told():
    flat = [(float(t), 300.0 + t % 3) for t in range(40)]
    assert grown(flat) == []
    assert "expected at most 10%" in grown([(t, size + 3 * t) for t, size in flat])[0]
