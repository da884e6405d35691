"""Pictures of numbers that are known."""

from __future__ import annotations

import pytest
import torch

from blockgate.lab.demo.charts import Scale, distribution_chart, speed_chart, trace_chart, training_chart
from blockgate.lab.demo.gates import Trace, layer_title
from tests.lab.demo.test_demo import read


@pytest.mark.parametrize("log", [False, True])
def test_scales_map_ends_to_ends(log):
    scale = Scale(low=1, high=100, first=300, last=20, log=log)
    assert scale(1) == 300
    assert scale(100) == pytest.approx(20)
    assert scale(10) == pytest.approx(160 if log else 300 - 280 * 9 / 99)


def curve(label, *perplexities):
    points = [{"updates": i, "epoch": i, "sparsity": 0.3 * i, "perplexity": p} for i, p in enumerate(perplexities)]
    return {"label": label, "curve": points}


def test_training_chart_draws_every_arm_and_escapes_its_name():
    svg = training_chart([curve("<b>dense", 100, 50, 20), curve("50%", 90, 60, 30)])
    page = read(svg)
    assert svg.count("<polyline") == 4
    assert "<b>" not in svg
    assert "<b>dense 20.0, 50% 30.0" in page.pictures[0]


def test_the_ideal_line_goes_through_one_at_full_density():
    points = [
        {"engine": engine, "density": d, "speedup": 1 / d, "speedup_over_packed_dense": 1 / d}
        for d in (1.0, 0.5, 0.1)
        for engine in ("blockgate int8", "blockgate fp32")
    ]
    svg = speed_chart({"points": points})
    read(svg)
    # Where the speed-up is 1 / density, lines end where the ideal one does.
    ideal = svg.split('class="ideal" d="M')[1].split('"')[0].replace("L", " ").split()
    line = svg.split('class="line l1" points="')[1].split('"')[0].replace(",", " ").split()
    assert [float(n) for n in ideal[:2] + ideal[2:]] == pytest.approx(
        [float(n) for n in line[-2:] + line[:2]], abs=0.11
    )


def test_bars_are_as_wide_as_their_shares():
    shares = {"always_on": 0.25, "input_dependent": 0.75, "always_off": 0.0}
    svg = distribution_chart([{"label": "50%", "gates": {"layer 1, input": shares}}])
    page = read(svg)
    widths = [float(part.split('width="')[1].split('"')[0]) for part in svg.split("<rect")[1:]]
    assert widths[0] / sum(widths) == pytest.approx(0.25, abs=1e-3)
    assert {"25%", "75%", "layer 1, input", "50%"} == set(page.words)


def test_a_trace_draws_one_cell_for_every_open_gate():
    gates = torch.tensor([[0.0, 1.0, 0.0, 0.4], [0.0, 0.8, 0.0, 0.0]])
    svg = trace_chart(Trace(label="90%", words=["a", "<unk>"], gates={"layer 1, input": gates}))
    page = read(svg)
    assert svg.count("z") == int((gates != 0).sum())
    assert "layer 1, input: 2 of 4 blocks are used" in page.words
    assert "<unk>" in page.words
    assert "<unk>" not in svg


def test_a_trace_with_every_gate_closed_is_empty():
    svg = trace_chart(Trace(label="90%", words=["a"], gates={"layer 1, input": torch.zeros(1, 4)}))
    read(svg)
    assert 'class="open' not in svg


def test_titles_of_layers():
    assert layer_title("layers.0.ih_l0") == "layer 1, input"
    assert layer_title("layers.0.hh_l1") == "layer 2, recurrent"
    assert layer_title("layers.1.hh_l0") == "layer 2, recurrent"
