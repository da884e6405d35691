"""What choosing is worth: the share of static minus oracle that gates recover, in words and by width."""

from __future__ import annotations

import pytest

from blockgate.lab.reproduce import Arm
from blockgate.lab.reproduce.merit import draw_widths, find_merits, merit_section

KINDS = ("mask", "random", "oracle", "margin")


def result(seed, perplexity, width=192):
    return {
        "seed": seed,
        "test": {"perplexity": perplexity},
        "gates": {"layer": {"input_dependent": 0.5, "dead": 0.25}},
        "costs": {"matrix_macs": 140 + width, "gate_macs": 140, "matrix_macs_dense": 1920},
        "run": {"model": {"cell": "lstm", "hidden_size": width}},
    }


@pytest.fixture
def merits():
    """Of two seeds, the second without an oracle."""
    arms = [Arm("ptb-lstm", kind, 90) for kind in KINDS]
    results = {
        "ptb-lstm-mask-90": [result(1, 135.0), result(2, 132.0)],
        "ptb-lstm-random-90": [result(1, 130.0)],
        "ptb-lstm-oracle-90": [result(1, 120.0)],
        "ptb-lstm-margin-90": [result(1, 122.5), result(2, 124.0)],
    }
    return find_merits(arms, results, ["margin"])


def test_the_figure_of_merit_is_told_seed_by_seed(merits):
    rows = [line for line in merit_section(merits).splitlines() if line.startswith("| ptb-lstm")]
    cells = [[cell.strip() for cell in row.split("|")[3:-1]] for row in rows]
    assert cells == [
        ["90%", "10.0%", "1", "130.00", "122.50", "120.00", "75.0%", "50.0%", "25.0%"],
        ["90%", "10.0%", "2", "132.00", "124.00", "-", "-", "50.0%", "25.0%"],
    ]
    assert merit_section([]) == ""


def test_the_picture_by_width_has_a_point_for_every_width_with_controls(merits, tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    wide = [Arm("ptb-wide", kind, 90) for kind in KINDS]
    scores = {"mask": 200.0, "oracle": 180.0, "margin": 190.0}
    results = {f"ptb-wide-{kind}-90": [result(1, score, 768)] for kind, score in scores.items()}
    merits += find_merits(wide, results, ["margin"])
    drawn, labels = [], []
    plot = Axes.plot

    def note(axis, x, y, *args, label, **options):
        drawn.append((x, y))
        labels.append(label)
        return plot(axis, x, y, *args, label=label, **options)

    monkeypatch.setattr(Axes, "plot", note)
    draw_widths(merits, tmp_path / "merit.png")
    assert labels == ["margin, revived, thin blocks, 90% (10.0% to 40.0% open)"] * 2
    assert drawn == [([192, 768], [75.0, 50.0]), ([192, 768], [50.0, 50.0])]
    assert (tmp_path / "merit.png").stat().st_size > 1000


def test_without_lstms_there_is_no_picture_by_width(tmp_path):
    draw_widths([], tmp_path / "merit.png")
    assert not list(tmp_path.iterdir())
