"""`blockgate atlas` shows what the run's own data and epochs say."""

from __future__ import annotations

import csv

import pytest
import torch

from blockgate.cli import main
from blockgate.inspect import record_gates
from blockgate.lab.training import load_trained, record_tour, train
from tests.corpora import tiny_image_run, write_images
from tests.inspect.atlas_page import numbers, read_page


@pytest.fixture(scope="module")
def of_images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    train(tiny_image_run(write_images(folder / "data"), folder / "run"), quiet=True)
    return folder / "run"


def atlas(run, file, *options):
    assert main(["atlas", str(run), "--output", str(file), *map(str, options)]) == 0
    return read_page(file)


def test_a_language_model(trained, tmp_path, capsys):
    page = atlas(trained / "run", tmp_path / "a.html", "--tokens", 12, "--rows", 60)
    assert capsys.readouterr().out == f"{tmp_path / 'a.html'}\n"
    model = load_trained(trained / "run")
    first = (trained / "texts" / "test.txt").read_text().replace("\n", " <eos> ").split()
    assert page["tokens"] == [word if word in model.vocabulary else "<unk>" for word in first[:12]]
    # What the first gate decides on those words, read one after the other.
    with torch.no_grad(), record_gates(model.model, trace=12) as record:
        model.model(model.vocabulary.encode(page["tokens"])[:, None])
    for shown in page["gates"]:
        got = numbers(shown["trace"], torch.uint8).view(12, -1) > 0
        assert torch.equal(got, record.gates[shown["name"]].trace != 0)
        assert shown["rows"] == 60
        assert sum(shown["classes"]["rows"]) == 60


def test_the_most_frequent_words_are_its_classes(trained, tmp_path):
    page = atlas(trained / "run", tmp_path / "a.html", "--rows", 80)
    words = (trained / "texts" / "test.txt").read_text().replace("\n", " <eos> ").split()
    columns, steps = 4, 20
    rows = dict(zip(page["classes"], page["gates"][0]["classes"]["rows"], strict=False))
    assert page["classes"][0] == max(rows, key=rows.get)
    assert rows[page["classes"][0]] == max(map(words[: columns * steps].count, set(words)))


def test_its_own_text_and_another_sparsity(trained, tmp_path):
    page = atlas(trained / "run", tmp_path / "a.html", "--text", "w1 w8 nonsense", "--rows", 40, "--sparsity", 0)
    assert page["tokens"] == ["w1", "w8", "<unk>"]
    assert {gate["target"] for gate in page["gates"]} == {1.0}


def test_shares_over_training_are_those_of_the_epochs(trained, tmp_path):
    page = atlas(trained / "run", tmp_path / "a.html", "--rows", 40)
    with (trained / "run" / "epochs.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    want = [[float(r[n]) for n in ("epoch", "always_open", "input_dependent", "dead_blocks")] for r in rows]
    assert [[p[0], p[1], p[2], p[4]] for p in page["history"]] == want
    assert want


def test_an_image_network_steps_through_some_of_each_class(of_images, tmp_path):
    page = atlas(of_images, tmp_path / "a.html", "--tokens", 16, "--rows", 50)
    assert page["tokens"] == sorted(page["tokens"])
    assert set(page["tokens"]) <= set(page["classes"]) == set("01234567")
    assert 8 <= len(page["tokens"]) <= 16
    assert all(gate["rows"] == 50 and gate["trace"] for gate in page["gates"])
    trained = load_trained(of_images)
    tour = record_tour(trained, "test", rows=50, tokens=16)
    assert tour.record.gates[page["gates"][0]["name"]].class_rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output", "atlas.png"], "expected a name that ends in .html"),
        (["--text", " "], "text: expected words"),
        (["--rows", "0"], "rows"),
        (["--tokens", "0"], "tokens"),
    ],
)
def test_mistakes_are_told_in_a_line(trained, tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    assert main(["atlas", str(trained / "run"), *options]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_text_for_images_and_a_model_without_gates_are_refused(of_images, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["atlas", str(of_images), "--text", "seven"]) == 2
    assert "expected a language model" in capsys.readouterr().err
    dense = ["--model.matrices", "dense", "--output", str(tmp_path / "dense"), "--epochs", "1"]
    assert main(["train", str(trained / "tiny.json"), *dense]) == 0
    capsys.readouterr()
    assert main(["atlas", str(tmp_path / "dense")]) == 2
    assert "expected one with gated layers" in capsys.readouterr().err
