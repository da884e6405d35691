"""Texts, images and how they are cut into batches."""

from __future__ import annotations

import gzip

import pytest
import torch

from blockgate.lab.data import Vocabulary, load_corpus, load_images
from blockgate.lab.data.batches import IGNORED, SHORTEST, Segment, cut_columns, equal_segments, varied_segments
from blockgate.lab.data.images import read_idx
from tests.corpora import write_images, write_texts
from tests.helpers import raises_blockgate


def test_a_folder_of_texts_becomes_numbers(tmp_path):
    for part, text in {"train": "b a b\n\nb c\n", "valid": "a z\n", "test": "c c\n"}.items():
        (tmp_path / f"{part}.txt").write_text(text)
    corpus = load_corpus(str(tmp_path))
    # <eos> and b occur three times, b first; a comes before c.
    assert corpus.vocabulary.words == ("b", "<eos>", "a", "c", "<unk>")
    assert corpus.parts["train"].tolist() == [0, 2, 0, 1, 1, 0, 3, 1]
    assert corpus.parts["valid"].tolist() == [2, 4, 1]
    assert corpus.statistics()["train"] == {"lines": 3, "words": 5, "tokens": 8}
    assert corpus.statistics()["total"] == {"lines": 5, "words": 9, "tokens": 14}


def test_a_trained_models_vocabulary_is_kept(tmp_path):
    vocabulary = Vocabulary(["<unk>", "<eos>", "w1"])
    corpus = load_corpus(str(write_texts(tmp_path)), vocabulary=vocabulary)
    assert corpus.vocabulary is vocabulary
    assert set(corpus.parts["test"].tolist()) == {0, 1, 2}


def test_bad_texts_are_refused(tmp_path):
    with raises_blockgate("a folder with train.txt, valid.txt and test.txt"):
        load_corpus(str(tmp_path))
    write_texts(tmp_path)
    (tmp_path / "test.txt").write_bytes(b"caf\xe9\n")
    with raises_blockgate("expected UTF-8 text, got 'a bad byte at 3'"):
        load_corpus(str(tmp_path))
    (tmp_path / "test.txt").write_text("\n \n")
    with raises_blockgate("an empty text"):
        load_corpus(str(tmp_path))
    with raises_blockgate("a data set of text"):
        load_corpus("mnist", tmp_path)


def test_vocabularies_without_the_two_signs_are_refused():
    with raises_blockgate("<eos> and <unk>"):
        Vocabulary(["a", "<eos>"])
    with raises_blockgate("different words"):
        Vocabulary(["a", "a", "<eos>", "<unk>"])


@pytest.mark.parametrize("packed", [True, False])
def test_images_are_read_packed_or_not(tmp_path, packed):
    images = load_images(str(write_images(tmp_path, packed=packed)))
    pixels, labels = images.train
    assert pixels.shape == (200, 8, 8)
    assert pixels.dtype == torch.uint8
    assert (pixels.float().mean(2).argmax(1) == labels).all()


def test_bad_image_files_are_refused(tmp_path):
    write_images(tmp_path, packed=False)
    file = tmp_path / "train-labels-idx1-ubyte"
    whole = file.read_bytes()
    for content in (whole[:-1], whole + b"x", b"", b"\0\0\x09\x01" + whole[4:], whole[:3]):
        file.write_bytes(content)
        with raises_blockgate("an IDX file of unsigned bytes"):
            read_idx(file)
    file.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 6]))
    with raises_blockgate("as many labels"):
        load_images(str(tmp_path))
    file.unlink()
    with raises_blockgate("without train-labels-idx1-ubyte"):
        load_images(str(tmp_path))
    broken = tmp_path / "x.gz"
    for content in (gzip.compress(whole)[:-9], b"not gzip"):
        broken.write_bytes(content)
        with raises_blockgate("a readable file"):
            read_idx(broken)
    with raises_blockgate("'mnist' or a folder"):
        load_images("ptb")


def test_columns_follow_the_text():
    tokens = torch.arange(12)
    inputs, targets = cut_columns(tokens, 3, keep_all=False)
    assert inputs.t().tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert targets.t().tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    inputs, targets = cut_columns(tokens, 3, keep_all=True)
    assert targets.t().tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, IGNORED]]
    assert inputs.t()[2].tolist() == [8, 9, 10, 0]
    with raises_blockgate("1 to 11, one word a column"):
        cut_columns(tokens, 12, keep_all=False)


def test_segments_cover_every_step_once():
    assert equal_segments(7, 3) == [Segment(0, 3), Segment(3, 3), Segment(6, 1)]
    segments = varied_segments(2000, 40, torch.Generator().manual_seed(1))
    assert [s.start for s in segments[1:]] == [s.start + s.length for s in segments[:-1]]
    assert sum(s.length for s in segments) == 2000
    assert len({s.length for s in segments}) > 5
    assert min(s.length for s in segments[:-1]) >= SHORTEST
    assert segments == varied_segments(2000, 40, torch.Generator().manual_seed(1))
