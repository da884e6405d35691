"""What is timed of trained models: every format, one text and several, screened output layers; and how it is shown."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from blockgate.errors import BlockgateError
from blockgate.lab.bench.decoding import require_likeliest
from blockgate.lab.models import ImageNetwork, LanguageModel
from blockgate.lab.reproduce import Arm
from blockgate.lab.reproduce.quality import draw_quality, points_of
from blockgate.lab.reproduce.report import table
from blockgate.lab.reproduce.timing import PACKED, _batches, time_models
from blockgate.lab.training import Trained
from blockgate.lab.training.tasks import make_task
from tests.corpora import tiny_image_run, tiny_text_run, write_images, write_texts
from tests.lab.reproduce.test_report import MACHINE, result, rows_of

DENSE, GATED, PRUNED = Arm("ptb-lstm", "dense"), Arm("ptb-lstm", "margin", 50), Arm("ptb-lstm", "mask", 50)


def trained(run, seed=0) -> Trained:
    """A model that nobody trained; its scores are spread so that rounding does not change the likeliest word."""
    torch.manual_seed(seed)
    task = make_task(run)
    model = task.make_model().eval()
    if isinstance(model, LanguageModel):
        nn.init.normal_(model.softmax.decoder.weight)
    return Trained(model, run, getattr(getattr(task, "corpus", None), "vocabulary", None), run.output)


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path / "texts", train=300, other=300)


def text_run(texts, tmp_path, *, cutoffs=()):
    run = tiny_text_run(texts, tmp_path / "run")
    return replace(run, model=replace(run.model, cutoffs=cutoffs, cell="lstm", weight_dropout=0.0, locked=False))


def test_every_format_batch_and_screened_layer_is_timed(texts, tmp_path):
    run = text_run(texts, tmp_path)
    dense = replace(run, model=replace(run.model, matrices="dense"))
    times = time_models({DENSE: trained(dense), GATED: trained(run)}, threads=1, seconds=0.001)
    for arm in (DENSE, GATED):
        seconds = times["seconds"][arm.name]
        assert set(seconds) == {"torch", *PACKED, "int8, screened", "int4, screened"}
        assert set(seconds["torch"]) == {"model", "layers", "model-16"}
        assert set(seconds["int4"]) == {"model", "layers", "likeliest", "model-16", "likeliest-16"}
        assert set(seconds["int8, screened"]) == {"likeliest", "likeliest-16"}
        assert set(times["quality"][arm.name]) == {"bfloat16", "int8", "int4", "int8, screened", "int4, screened"}
        assert all(0 < facts["median"] < 1 for parts in seconds.values() for facts in parts.values())


def test_adaptive_output_layers_are_not_screened(texts, tmp_path):
    times = time_models({GATED: trained(text_run(texts, tmp_path, cutoffs=(10,)))}, threads=1, seconds=0.001)
    assert set(times["seconds"][GATED.name]) == {"torch", *PACKED}
    assert all("likeliest" not in parts for parts in times["seconds"][GATED.name].values())


def test_images_are_timed_one_by_one_and_several_at_once(tmp_path):
    run = tiny_image_run(write_images(tmp_path / "images"), tmp_path / "run")
    one = trained(run)
    assert isinstance(one.model, ImageNetwork)
    times = time_models({Arm("mnist", "dynamic", 90): one}, threads=1, seconds=0.001)
    assert set(times["seconds"]["mnist-dynamic-90"]["int4"]) == {"model", "model-16"}


def test_texts_are_read_side_by_side():
    words = list(torch.arange(7).view(-1, 1, 1))
    assert [batch.tolist() for batch in _batches(words, 2)] == [[[0, 3]], [[1, 4]], [[2, 5]]]
    images = list(torch.arange(4.0).view(-1, 1, 1))
    assert [batch.flatten().tolist() for batch in _batches(images, 2)] == [[0.0, 2.0], [1.0, 3.0]]
    assert {batch.shape for batch in _batches(images, 2)} == {(2, 1)}


def test_what_finds_other_words_is_not_timed(texts, tmp_path):
    model = trained(text_run(texts, tmp_path)).model
    words = [torch.tensor([[1, 2]]), torch.tensor([[3, 4]])]
    with torch.no_grad():
        require_likeliest("a", model, model, words)
        wrong = copy.deepcopy(model)
        wrong.softmax.decoder.weight.neg_()
        with pytest.raises(BlockgateError, match="a: expected the likeliest words, got some whose log-probability"):
            require_likeliest("a", wrong, model, words)


def timed(**engines):
    return {
        engine.replace("_", ", "): {p: {"median": us * 1e-6} for p, us in ps.items()} for engine, ps in engines.items()
    }


RESULTS = {
    arm.name: [result(1, score, score, macs=1, layers=layers, dense_layers=100)]
    for arm, score, layers in ((DENSE, 90.0, 100), (GATED, 91.0, 51), (PRUNED, 99.0, 50))
}
TIMES = {
    "machine": MACHINE,
    "seconds": {
        DENSE.name: timed(
            int8={"model": 40, "layers": 10, "model-16": 20, "likeliest": 38},
            int8_screened={"likeliest": 12},
            int4={"model": 30, "model-16": 18},
        ),
        GATED.name: timed(
            int8={"model": 35, "layers": 5, "model-16": 15, "likeliest": 33},
            int8_screened={"likeliest": 7},
            int4={"model": 28, "model-16": 12},
        ),
    },
    "quality": {GATED.name: {"int4": 92.0, "int8, screened": 91.5}},
}


def test_times_have_a_table_for_each_batch_and_one_for_likeliest_words():
    text = table("T", [DENSE, GATED, PRUNED], RESULTS, "laptop", TIMES)
    parts = {part.splitlines()[0]: part for part in text.split("## ")[1:]}
    one, several = (parts[f"Time per token in microseconds, batch {batch}"] for batch in (1, 16))
    assert "| sparsity | density | int8 | int4 | int8, layers |" in one
    gated = ["ptb-lstm", "margin, revived, thin blocks", "50%", "51.0%"]
    assert rows_of(one)[1] == [*gated, "35.0", "28.0", "5.0"]
    assert rows_of(several)[1] == [*gated, "15.0", "12.0"]
    likeliest = parts["Time per likeliest word in microseconds"]
    assert "| int8, batch 1 | int8, screened, batch 1 |" in likeliest
    assert rows_of(likeliest)[1] == [*gated, "33.0", "7.0"]


def test_the_picture_has_a_panel_for_each_format_and_batch(tmp_path, monkeypatch):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    drawn, figures = [], []
    plot, save = Axes.plot, Figure.savefig

    def note(axis, x, y, *args, label, **options):
        drawn.append((label, [round(one, 3) for one in x], y))
        return plot(axis, x, y, *args, label=label, **options)

    monkeypatch.setattr(Axes, "plot", note)
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: figures.append(figure) or save(figure, *a, **k))
    points = list(points_of([DENSE, GATED, PRUNED], RESULTS, TIMES, "perplexity"))
    draw_quality(points, "perplexity", tmp_path / "q.png")
    assert [axis.get_title() for axis in figures[0].axes] == [
        "packed to int8, batch 1",
        "packed to int4, batch 1",
        "packed to int8, batch 16",
        "packed to int4, batch 16",
    ]
    margin = "margin, revived, thin blocks"
    # Screened where there is such a time.
    assert drawn == [
        ("dense", [12], [90.0]),
        (margin, [7], [91.5]),
        ("dense", [30], [90.0]),
        (margin, [28], [92.0]),
        ("dense", [20], [90.0]),
        (margin, [15], [91.0]),
        ("dense", [18], [90.0]),
        (margin, [12], [92.0]),
    ]
    texts = [text.get_text() for axis in figures[0].axes for text in axis.texts]
    assert texts == ["50% (51.0%)"] * 4
    assert "output layer screened" in figures[0].axes[0].get_xlabel()
    assert (tmp_path / "q.png").stat().st_size > 10_000
