"""Pictures are written whole or not at all, and show every gate that was recorded."""

from __future__ import annotations

import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.errors import BlockgateError
from blockgate.inspect import draw_classes, draw_distribution, draw_sensitivity, draw_trace
from tests.helpers import raises_blockgate
from tests.inspect.helpers import small_net

DRAW = {"distribution": draw_distribution, "classes": draw_classes, "trace": draw_trace}


def record_of(model, features, rows=30, classes=3):
    with torch.no_grad(), bg.record_gates(model, trace=12) as record, record.labelled(torch.arange(rows) % classes):
        model(torch.randn(rows, features))
    return record


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were written."""
    pictures = sys.modules["blockgate.inspect.pictures"]
    figures = []
    write = pictures._write
    monkeypatch.setattr(pictures, "_write", lambda figure, path: figures.append(figure) or write(figure, path))
    return figures


def texts_of(figure):
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text)]


@pytest.mark.parametrize("kind", DRAW)
def test_png_and_svg_by_name(kind, tmp_path):
    record = record_of(small_net(), 6)
    png, svg = (DRAW[kind](record, tmp_path / f"{kind}.{suffix}") for suffix in ("png", "SVG"))
    assert png.read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([png.name, svg.name])
    first = svg.read_bytes()
    DRAW[kind](record, str(svg))
    assert svg.read_bytes() == first


def test_no_figure_is_left_open_and_no_display_needed(tmp_path):
    code = f"""
import sys, torch, blockgate as bg
layer = bg.DynamicSparseLinear(8, 8, block_size=4)
with bg.record_gates(layer) as record:
    layer(torch.randn(4, 8))
assert "matplotlib" not in sys.modules
bg.inspect.draw_distribution(record, {str(tmp_path / "a.png")!r})
assert "matplotlib" in sys.modules
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("layers", [2, 20])
@pytest.mark.parametrize("kind", DRAW)
def test_few_and_many_layers_are_all_named_and_don_t_overlap(kind, layers, tmp_path, drawn):
    # 3 x 2 blocks, ragged
    net = nn.Sequential(*(bg.DynamicSparseLinear(9, 9, block_size=(4, 5)) for _ in range(layers)))
    DRAW[kind](record_of(net, 9), tmp_path / "p.png")
    (figure,) = drawn
    texts = [re.split("\n|, ", text)[0] for text in texts_of(figure)]
    assert all(f"{layer}" in texts for layer in range(layers))
    if kind == "distribution":
        assert figure.get_figheight() < 1.2 + 0.4 * layers
        return
    boxes = [axes.get_tightbbox() for axes in figure.axes if axes.images]
    assert len(boxes) == (layers if kind == "trace" else 3 * layers)
    for number, box in enumerate(boxes):
        assert box.width > 20
        assert box.height > 20
        assert not any(box.padded(-1).overlaps(other) for other in boxes[number + 1 :])


def test_many_classes_go_into_lines_of_equal_length(tmp_path, drawn):
    draw_classes(record_of(bg.DynamicSparseLinear(4, 4, block_size=2), 4, classes=14), tmp_path / "p.png")
    panels = [axes.get_position() for axes in drawn[0].axes if axes.images]
    assert [len([p for p in panels if p.y0 == y]) for y in sorted({p.y0 for p in panels})] == [7, 7]
    assert {str(label) for label in range(14)} <= set(texts_of(drawn[0]))


def test_what_the_bars_say(tmp_path, drawn):
    record = record_of(small_net(sparsity=0.0, normalise="none"), 6)
    draw_distribution(record, tmp_path / "p.png", threshold=0.9)
    texts = texts_of(drawn[0])
    assert {f"{name}, {gate.measured_density:.1%} open" for name, gate in record.gates.items()} <= set(texts)
    assert {"always on", "input dependent", "always off"} <= set(texts)
    assert "% of blocks (always: for at least 90% of inputs)" in texts


def test_what_the_heat_maps_show(tmp_path, drawn):
    record = record_of(small_net(), 6)
    draw_classes(record, tmp_path / "p.png", gates=["4"], class_names=["cat", "dog", "owl"])
    images = [axes.images[0].get_array() for axes in drawn[0].axes if axes.images]
    assert [image.tolist() for image in images] == [record.gates["4"].frequency(label).tolist() for label in range(3)]
    open_share = f"{record.gates['4'].measured_density:.1%}"
    assert {"cat", "dog", "owl", f"4\n{open_share} open"} <= set(texts_of(drawn[0]))


def test_what_a_trace_shows(tmp_path, drawn):
    record = record_of(small_net(), 6)
    tokens = ["$broken^$", *(f"word{n}" for n in range(11))]
    draw_trace(record, tmp_path / "p.png", tokens=tokens, gates=["2"])
    (image,) = [axes.images[0].get_array() for axes in drawn[0].axes if axes.images]
    trace = record.gates["2"].trace
    used = (trace != 0).sum(0)
    assert image.shape == (int((used > 0).sum()), 12)
    assert (~image.mask).sum(1).tolist() == sorted(used[used > 0].tolist(), reverse=True)
    assert image.max() == 1
    assert set(tokens) <= set(texts_of(drawn[0]))


def test_a_trace_of_closed_gates(tmp_path):
    layer = bg.DynamicSparseLinear(4, 4, block_size=2)
    nn.init.zeros_(layer.gate.weight)
    assert draw_trace(record_of(layer, 4), tmp_path / "p.png").exists()


def test_errors(tmp_path):
    net = small_net()
    record, empty = record_of(net, 6), bg.record_gates(net)
    for draw in DRAW.values():
        with raises_blockgate("picture"):
            draw(empty, tmp_path / "p.png")
        with raises_blockgate("path"):
            draw(record, tmp_path / "p.jpg")
        with pytest.raises(BlockgateError, match="expected to write"):
            draw(record, tmp_path / "nowhere" / "p.png")
    for draw in (draw_classes, draw_trace):
        with raises_blockgate("gates"):
            draw(record, tmp_path / "p.png", gates=["5"])
    with raises_blockgate("tokens"):
        draw_trace(record, tmp_path / "p.png", tokens=["one"])
    with raises_blockgate("none for [1, 2]"):
        draw_classes(record, tmp_path / "p.png", class_names=["zero"])
    assert not list(tmp_path.iterdir())


def test_too_many_panels_for_one_picture(tmp_path):
    net = nn.Sequential(*(bg.DynamicSparseLinear(9, 9, block_size=(4, 5)) for _ in range(30)))
    record = record_of(net, 9, rows=400, classes=400)
    with raises_blockgate("picture: expected at most 400 inches of panels"):
        draw_classes(record, tmp_path / "p.png")


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    record = record_of(small_net(), 6)
    path = draw_distribution(record, tmp_path / "p.png")
    before = path.read_bytes()

    def full(_, part, **__):
        part.write_bytes(b"half a picture")
        raise OSError("no space left")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(BlockgateError, match="no space left"):
        draw_distribution(record, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(BlockgateError, match=r"pip install 'blockgate\[train\]'"):
        draw_distribution(record_of(small_net(), 6), tmp_path / "p.png")


@pytest.mark.parametrize("layers", [1, 40])
@pytest.mark.parametrize("loss", [None, lambda model, batch: model(batch).square().mean()], ids=["errors", "losses"])
def test_sensitivity_is_drawn_with_all_its_numbers(layers, loss, tmp_path, drawn):
    net = nn.Sequential(*(bg.DynamicSparseLinear(8, 8, block_size=(8, 1), gate="norm") for _ in range(layers)))
    found = bg.sensitivity(net, [torch.randn(6, 8)], levels=(0.25, 0.5), loss=loss)
    draw_sensitivity(found, tmp_path / "s.png")
    (figure,) = drawn
    texts = texts_of(figure)
    assert {"25%", "50%", *(layer.name for layer in found.layers)} <= set(texts)
    lost = found.layers[-1].errors if loss is None else found.layers[-1].losses
    assert f"{lost[0.5]:.2g}" in texts
    assert ("rise of the loss" in texts) is (loss is not None)
