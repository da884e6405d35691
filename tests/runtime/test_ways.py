"""Ways to run a layer: all give the same bits, and `explain` tells which one is taken."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.formats import FORMATS
from blockgate.ops import native
from blockgate.runtime.prepared import Ways

pytestmark = [
    pytest.mark.skipif(native.unavailable_reason() is not None, reason="native kernels are not built"),
    pytest.mark.usefixtures("two_threads"),
]

# Enough for a look at each of four ways, where nothing else runs.
CALLS = 60


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def gated():
    return bg.DynamicSparseLinear(301, 1000, block_size=(128, 64), sparsity=0.5).eval()


def dense():
    return nn.Linear(301, 1000).eval()


@torch.inference_mode()
def ways_of(run, handle, use, rows):
    """Threads and kinds of the ways, after each of them was taken and gave the same bits."""
    first = run()
    ways = Ways.of(handle(), use, rows).ways
    try:
        for way in range(len(ways)):
            torch.ops.blockgate.hold_way(way)
            torch.testing.assert_close(run(), first, rtol=0, atol=0, equal_nan=True)
    finally:
        torch.ops.blockgate.hold_way(-1)
    return {(threads, kind) for threads, kind, _ in ways}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("make", [gated, dense])
@pytest.mark.parametrize(("rows", "kinds"), [(1, {""}), (5, {"", "row by row"}), (70, {""})])
def test_every_way_gives_the_same_bits(make, name, rows, kinds):
    layer, x = bg.pack(make(), name), torch.randn(rows, 301)
    x[1:2, 7] = torch.inf
    ways = ways_of(lambda: layer(x), lambda: layer.prepared().handle, "layer", rows)
    assert ways == {(threads, kind) for threads in (1, 2) for kind in kinds}


def test_unpacked_layers_choose_too():
    layer, x = gated(), torch.randn(1, 301)
    assert ways_of(lambda: layer(x), lambda: layer._fused(x).handle, "layer", 1) == {(1, ""), (2, "")}


@pytest.mark.parametrize(("steps", "use"), [(1, "stack"), (3, "steps")])
def test_lstms_choose_too(steps, use):
    lstm = bg.pack(bg.DynamicSparseLSTM(96, 288, 2, block_size=32, sparsity=0.5))
    x = torch.randn(steps, 1, 96)
    matrices = lstm._matrices()
    for layer in range(1 if use == "stack" else 2):
        matrix = matrices[2 * layer + (use == "steps")]
        found = ways_of(lambda: lstm(x)[0], lambda matrix=matrix: matrix.prepared().handle, use, 1)
        assert found == {(1, ""), (2, "")}


def test_small_layers_have_one_way():
    layer = bg.pack(nn.Linear(64, 64))
    layer(torch.randn(1, 64))
    assert Ways.of(layer.prepared().handle, "layer", 1).calls == 0
    assert bg.explain(layer, torch.randn(1, 64)).layers[0].figures == ""


def test_batches_of_other_sizes_have_their_own_figures():
    layer = bg.pack(dense())
    for rows in (1, 3, 3):
        layer(torch.randn(rows, 301))
    handle = layer.prepared().handle
    assert [Ways.of(handle, "layer", rows).calls for rows in (1, 2, 3, 4)] == [1, 2, 2, 0]


def test_explain_shows_the_choice_and_its_figures():
    model = bg.pack(nn.Sequential(dense(), nn.LSTM(1000, 256)))
    x = torch.randn(4, 1, 301)
    assert [row.figures for row in bg.explain(model, x).layers] == ["", ""]
    for _ in range(CALLS):
        model(x)
    table = bg.explain(model, x)
    linear, lstm = (row.figures for row in table.layers)
    # On a busy machine looks at other ways are put off.
    assert linear.count(" ms") >= 1
    assert lstm.count(" ms") >= 1
    assert linear.count(" ms") + linear.count("not tried") == 4
    assert lstm.count(" ms") + lstm.count("not tried") == 2
    assert "1 thread, row by row" in linear
    assert linear in str(table)


def test_figures_name_the_present_way_first():
    ways = Ways([(2, "", 2e-3), (1, "", 1e-3), (2, "row by row", 0.0)], present=1, calls=9, looks=2, falls=3)
    assert ways.text(2) == "1 thread 2 ms (2 threads 4 ms; 2 threads, row by row not tried), 3 of 9 calls held up"
