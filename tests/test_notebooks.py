"""The notebooks run from top to bottom, and come without outputs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
from nbclient import NotebookClient  # noqa: E402

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

# What each writes, beside what it prints.
PAGES = {"1": "mlp-atlas.html", "2": "lstm-atlas.html", "3": "transformer-atlas.html"}


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda file: file.stem)
def ran(request, tmp_path_factory):
    """A notebook after it was executed: its number, all that it printed, and the folder that it ran in."""
    folder = tmp_path_factory.mktemp("notebook")
    book = nbformat.read(request.param, as_version=4)
    NotebookClient(book, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    return request.param.name[0], printed, folder


def percents(pattern: str, printed: str) -> list[float]:
    return [float(number) for number in re.findall(pattern + r"\s*([\d.]+)%", printed)]


@pytest.mark.slow
def test_runs_and_shows_what_it_promises(ran):
    number, printed, folder = ran
    assert PAGES[number] in printed
    assert (folder / PAGES[number]).stat().st_size > 20_000
    if number == "1":
        dense, gated = percents("dense:", printed)[0], percents("gated:", printed)[0]
        packed = float(re.findall(r"([\d.]+)% right", printed)[-1])
        assert min(dense, gated) > 60
        assert abs(gated - packed) < 3
        assert "1 layers gated, 2 skipped" in printed
    elif number == "2":
        ((perplexity, packed),) = re.findall(r"perplexity ([\d.]+), packed to int8 ([\d.]+)", printed)
        assert float(perplexity) < 300
        assert abs(float(packed) / float(perplexity) - 1) < 0.05
        assert printed.count("fused native") == 2
    else:
        before, after = (
            percents("before: logits differ by", printed)[0],
            percents("after:  logits differ by", printed)[0],
        )
        assert after < 0.8 * before
        assert percents("int8 without gates: logits differ by", printed)[0] < 3
        assert "layers gated" in printed


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_it_is_stored_without_outputs(file):
    book = nbformat.read(file, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert code
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert book.cells[0].source.startswith("# ")


def test_the_pages_name_all_of_them():
    page = (FOLDER.parents[1] / "docs" / "index.md").read_text()
    assert [file.name[0] for file in NOTEBOOKS] == ["1", "2", "3"]
    assert all(f"examples/notebooks/{file.name}" in page for file in NOTEBOOKS)
