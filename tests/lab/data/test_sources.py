"""Published data sets: found in several layouts, checked, downloaded from a server of our own."""

from __future__ import annotations

import gc
import hashlib
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from blockgate.cli import main
from blockgate.errors import BlockgateError
from blockgate.lab.data import SOURCES, data_dir, fetch, load_corpus, load_images, locate
from blockgate.lab.data.sources import DataFile, Source
from tests.helpers import raises_blockgate

CONTENT = b"the cat sat\non the mat\n" * 50

needs_data = pytest.mark.skipif("BLOCKGATE_DATA" not in os.environ, reason="BLOCKGATE_DATA names no folder")


@pytest.fixture
def source(monkeypatch):
    """A published data set of one file."""
    file = DataFile(name="train.txt", published="tiny.train.txt", sha256=hashlib.sha256(CONTENT).hexdigest())
    made = Source(files={"train": file}, mirror="http://unreachable.invalid", folders=("tiny", "elsewhere/tiny"))
    monkeypatch.setitem(SOURCES, "tiny", made)


class Mirror(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.startswith("/missing"):
            self.send_error(404)
            return
        content = CONTENT.replace(b"cat", b"dog") if self.path.startswith("/altered") else CONTENT
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        broken = self.path.startswith("/broken")
        self.wfile.write(content[: len(content) // 2] if broken else content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def mirror():
    with ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.usefixtures("source")
def test_a_download_arrives_checked_and_is_not_repeated(mirror, tmp_path):
    files = fetch("tiny", tmp_path, mirror=f"{mirror}/good")
    assert files == {"train": tmp_path / "tiny" / "train.txt"}
    assert files["train"].read_bytes() == CONTENT
    assert fetch("tiny", tmp_path, mirror=f"{mirror}/missing") == files


@pytest.mark.usefixtures("source")
# The downloader leaves sockets of broken connections to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("path", "reason"), [("altered", "SHA256 hash"), ("broken", "IncompleteRead"), ("missing", "404")]
)
def test_a_failed_download_is_one_error_and_leaves_nothing(mirror, tmp_path, path, reason):
    with raises_blockgate("the published file") as caught:
        fetch("tiny", tmp_path, mirror=f"{mirror}/{path}")
    assert reason in str(caught.value)
    assert "--mirror" in str(caught.value)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []
    del caught
    gc.collect()


@pytest.mark.usefixtures("source")
def test_an_unreachable_mirror_is_one_error(tmp_path):
    address = "http://127.0.0.1:9/tiny.train.txt"
    message = f"Download failed: no network ({address}). Retry, name another address"
    with pytest.raises(BlockgateError, match=re.escape(message)) as caught:
        fetch("tiny", tmp_path, mirror="http://127.0.0.1:9")
    assert "Pool" not in str(caught.value)


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("ProxyError", "the proxy can't be reached"),
        ("SSLError", "no secure connection"),
        ("ConnectTimeout", "no answer in time"),
        ("ReadTimeout", "no answer in time"),
        ("ConnectionError", "no network"),
    ],
)
def test_no_kind_of_failed_connection_shows_its_pool(tmp_path, monkeypatch, kind, reason):
    pooch, requests = pytest.importorskip("pooch"), pytest.importorskip("requests")

    def fail(*_args, **_options):
        raise getattr(requests.exceptions, kind)("HTTPSConnectionPool(host='unreachable.invalid', port=443)")

    monkeypatch.setattr(pooch, "retrieve", fail)
    message = f"Download failed: {reason} (http://unreachable.invalid/tiny.train.txt)"
    with pytest.raises(BlockgateError, match=re.escape(message)) as caught:
        fetch("tiny", tmp_path)
    assert "Pool" not in str(caught.value)
    assert "BLOCKGATE_DATA" in str(caught.value)


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("place", ["tiny/train.txt", "tiny/tiny.train.txt", "elsewhere/tiny/tiny.train.txt"])
def test_copies_are_found_in_every_layout(tmp_path, place):
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_bytes(CONTENT)
    assert locate("tiny", tmp_path) == {"train": tmp_path / place}


@pytest.mark.usefixtures("source")
def test_missing_truncated_and_altered_files_are_refused(tmp_path):
    with raises_blockgate("expected a file train.txt in") as caught:
        locate("tiny", tmp_path)
    assert "blockgate data fetch tiny" in str(caught.value)
    file = tmp_path / "tiny" / "train.txt"
    file.parent.mkdir()
    for content in (CONTENT[:-1], CONTENT.replace(b"cat", b"dog", 1), b""):
        file.write_bytes(content)
        for look in (locate, fetch):
            with raises_blockgate("truncated or altered") as caught:
                look("tiny", tmp_path)
            assert f"{len(content)} bytes" in str(caught.value)


def test_the_data_folder_comes_from_the_argument_the_environment_or_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("BLOCKGATE_DATA", str(tmp_path))
    assert data_dir() == tmp_path
    assert data_dir(tmp_path / "other") == tmp_path / "other"
    monkeypatch.delenv("BLOCKGATE_DATA")
    assert data_dir().name == "blockgate"


def test_the_command_reports_a_missing_set_in_one_line(tmp_path, capsys):
    assert main(["data", "check", "ptb", "--data-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "blockgate data fetch ptb" in error


@needs_data
@pytest.mark.parametrize(
    ("name", "types", "words", "tokens"),
    [("ptb", 10_000, 1_036_580, 1_085_779), ("wikitext-2", 33_278, 2_507_007, 2_551_843)],
)
def test_the_corpora_have_the_published_sizes(name, types, words, tokens):
    """The paper counts Penn Treebank without line ends (1,036,580), and WikiText-2 with them (2,551,843)."""
    corpus = load_corpus(name)
    total = corpus.statistics()["total"]
    assert (len(corpus.vocabulary), total["words"], total["tokens"]) == (types, words, tokens)
    assert all(int(part.max()) < types for part in corpus.parts.values())


@needs_data
def test_mnist_has_the_published_sizes():
    images = load_images("mnist")
    assert images.train[0].shape == (60_000, 28, 28)
    assert images.test[0].shape == (10_000, 28, 28)
    assert images.train[1][:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]
    assert images.test[1].bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
