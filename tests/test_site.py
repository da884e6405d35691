"""The documentation site builds without a warning, and asks nothing of other hosts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    # The announcement of the theme's authors is no warning of ours.
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_there(site):
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs")).with_suffix(".html").is_file(), page


def test_files_outside_of_docs_are_there(site):
    page = (site / "performance.html").read_text()
    results = set(re.findall(r'href="(repository/benchmarks/results/lstm[^"]*)"', page))
    assert len(results) >= 2
    assert all("blockgate int8" in (site / file).read_text() for file in results)
    assert (site / "repository" / "examples" / "serve_lstm.py").is_file()


def test_the_reference_has_arguments_and_types(site):
    page = (site / "api" / "layers.html").read_text()
    for words in ("block_size", "share of blocks that stay closed", "DynamicSparseLSTMCell", "from_dense"):
        assert words in page


def test_nothing_is_fetched_from_other_hosts(site):
    for page in site.rglob("*.html"):
        fetched = re.findall(r'<(?:script|img|link|iframe)[^>]*?(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert not fetched, page
    for style in site.rglob("*.css"):
        assert not re.findall(r"url\([\"']?https?://[^)]*", style.read_text()), style


def test_search_needs_no_server(site):
    """Pages from the disk get the index as a script, and a frame in place of the worker that browsers refuse."""
    assert (site / "search" / "search_index.js").read_text().startswith("var __index = {")
    for page, script in (("index.html", "theme/iframe-worker.js"), ("api/layers.html", "../theme/iframe-worker.js")):
        assert f'<script src="{script}">' in (site / page).read_text()


@pytest.mark.parametrize("page", ["index.html", "api/layers.html"])
def test_search_finds_pages_that_were_opened_from_the_disk(site, page):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    address = f"{(site / page).as_uri()}?q=SparsityRamp"
    shown = subprocess.run([browser, *options, address], capture_output=True, text=True, check=True).stdout
    assert re.search(r"[1-9]\d* matching document", shown)
    assert 'href="file://' in shown.split('class="md-search-result__list"')[1]
