"""`blockgate demo --quick` from end to end: the table, the numbers and the page say the same, and are whole."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser

import pytest

from blockgate.cli import main
from blockgate.lab.demo.page import HEAD, table_rows
from blockgate.lab.training import load_trained

SECTIONS = ("numbers", "training", "speed", "distribution", "trace", "method", "machine", "next")
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Checks that tags are balanced, and collects what tests look at."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.pictures: list[str] = []
        self.sources: list[str] = []
        self.rows: list[list[str]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [given["id"]] if "id" in given else []
        self.sources += [given[name] for name in ("src", "href", "data", "action") if name in given]
        if given.get("role") == "img":
            self.pictures.append(given["aria-label"])
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in {"td", "th"}:
            self.rows[-1][-1] += data
        if self.open and self.open[-1] == "text":
            self.words.append(data)


def read(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    assert not page.open
    return page


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A folder with files of somebody else's, in which the demo has run; and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "runs" / "dense").mkdir(parents=True)
    (folder / "runs" / "dense" / "mine.txt").write_text("keep")
    (folder / "notes.txt").write_text("keep")
    (folder / "report.html").write_text("old")
    # An unfinished run of an earlier demo is in the way.
    (folder / "runs" / "dense" / "run.json").write_text("{}")
    command = [sys.executable, "-W", "error", "-m", "blockgate", "demo", "--quick", "--json", "--threads", "1"]
    done = subprocess.run([*command, "--output", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder, done


def test_stdout_is_the_numbers_and_stderr_the_progress(demo):
    folder, done = demo
    numbers = json.loads(done.stdout)
    assert numbers == json.loads((folder / "numbers.json").read_text())
    assert numbers["quick"] is True
    assert "--quick" in numbers["command"]
    assert "report.html" in done.stderr
    for title in ("This takes about", "1/4", "2/4", "3/4", "4/4"):
        assert title in done.stderr


def test_the_last_line_is_a_command_that_works_as_printed(demo):
    folder, done = demo
    last = done.stderr.splitlines()[-1]
    command = last.removeprefix("next:").strip()
    assert last.startswith("next:")
    assert str(folder / "runs" / "dynamic-90") in command
    assert f"{html.escape(command.split(' generate ')[0])} generate" in (folder / "report.html").read_text()
    # A shell that knows nothing of the environment.
    bare = {name: value for name, value in os.environ.items() if name not in {"PATH", "VIRTUAL_ENV"}}
    bare["PATH"] = "/usr/bin:/bin"
    ran = subprocess.run(["/bin/sh", "-c", command], env=bare, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()


def test_numbers_make_sense(demo):
    numbers = json.loads(demo[1].stdout)
    dense, half, tenth = numbers["arms"]
    words = numbers["corpus"]["vocabulary"]
    for arm in numbers["arms"]:
        assert 1 < arm["test_perplexity"] < words
        assert arm["curve"]
    assert dense["density"] == 1
    assert 0 < tenth["density"] < half["density"] <= 0.5 + 1e-9
    assert dense["macs"] == dense["macs_dense"] > half["macs"] > tenth["macs"] > 0
    for arm in (half, tenth):
        sparsities = [point["sparsity"] for point in arm["curve"]]
        assert sparsities == sorted(sparsities)
        assert (sparsities[0], sparsities[-1]) == (0, arm["sparsity"])
        assert len(arm["gates"]) == 2  # of the input, and of the last state
        for shares in arm["gates"].values():
            assert sum(shares.values()) == pytest.approx(1)
    by_name = {f"{one['label']} / {one['engine']}": one for one in numbers["speeds"]}
    dense_ways = [one for one in numbers["speeds"] if one["model"] == "dense"]
    assert {"torch fp32", "torch int8", "blockgate fp32", "blockgate int8"} <= {one["engine"] for one in dense_ways}
    baseline = min(one["seconds"] for one in dense_ways)
    assert by_name[numbers["fastest_dense"]]["seconds"] == baseline
    assert numbers["layers"]["dense"][numbers["layers"]["fastest_dense"]] == min(numbers["layers"]["dense"].values())
    for one in numbers["speeds"]:
        assert one["p10"] <= one["seconds"] <= one["p90"]
        assert len(one["rounds"]) >= 2
        assert one["speedup"] == pytest.approx(baseline / one["seconds"])
        assert one["tokens_per_second"] == pytest.approx(1 / one["seconds"])
        if one["engine"] in {"torch fp32", "blockgate fp32"}:
            trained = next(arm for arm in numbers["arms"] if arm["name"] == one["model"])
            assert one["test_perplexity"] == pytest.approx(trained["test_perplexity"], rel=1e-2)
    densities = [point["density"] for point in numbers["layers"]["points"]]
    assert densities == sorted(densities, reverse=True)
    assert densities[0] == 1
    assert densities[-1] == pytest.approx(2 / 24)  # two blocks of the 24 in a row


def test_the_page_is_whole_and_needs_nothing_else(demo):
    folder, _ = demo
    text = (folder / "report.html").read_text()
    page = read(text)
    assert set(SECTIONS) <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert not page.sources
    assert not re.search(r"https?:|url\(|@import|<script|\$[a-z_]+", text)
    assert len(page.pictures) == 4
    assert all(len(alt) > 30 for alt in page.pictures)
    assert "quick run" in text
    assert "nan" not in text.lower().replace("</span", "")


def test_the_page_shows_the_numbers(demo):
    folder, done = demo
    numbers = json.loads(done.stdout)
    page = read((folder / "report.html").read_text())
    assert page.rows == [HEAD, *table_rows(numbers)]
    fastest = numbers["speeds"][-1]
    cells = dict(zip(HEAD, page.rows[-1], strict=True))
    if numbers["busy"]:
        assert cells["speed-up"] == "busy"
        assert "busy: times unreliable" in (folder / "report.html").read_text()
    else:
        assert float(cells["speed-up"].removesuffix("x")) == pytest.approx(fastest["speedup"], abs=0.005)
    assert float(cells["perplexity"]) == pytest.approx(fastest["test_perplexity"], abs=0.05)
    assert int(cells["tokens/s"].replace(",", "")) == round(fastest["tokens_per_second"])


def test_files_of_others_are_left_alone_and_models_can_be_used(demo):
    folder, _ = demo
    assert (folder / "notes.txt").read_text() == "keep"
    assert (folder / "runs" / "dense" / "mine.txt").read_text() == "keep"
    assert load_trained(folder / "runs" / "dynamic-90").vocabulary is not None
    assert not list(folder.rglob(".*"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--threads", "0"], "--threads"),
        (["--seed", "-1"], "--seed"),
        (["--output", "{}/file"], "--output"),
        (["--output", "{}/file/below"], "--output"),
    ],
)
def test_mistakes_end_with_code_2_and_one_line(args, message, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["demo", "--quick", "--output", str(tmp_path), *(arg.format(tmp_path) for arg in args)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--help"])
    assert stop.value.code == 0
    assert "    blockgate demo --quick --json" in capsys.readouterr().out


def test_ctrl_c_says_what_is_kept_and_ends_with_130(tmp_path):
    (tmp_path / "report.html").write_text("old")
    command = [sys.executable, "-m", "blockgate", "demo", "--threads", "1", "--output", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "runs" / "dense" / "run.json").exists() and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        error = process.communicate()[1]
    assert process.returncode == 130, error
    assert "Traceback" not in error
    last = error.splitlines()[-1]
    assert last.startswith("blockgate: interrupted: ")
    assert str(tmp_path / "runs") in last
    assert (tmp_path / "report.html").read_text() == "old"
