"""Every Python block of the README and the docs runs as it stands."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_code_block_runs(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "<documentation>", "exec"), {"__name__": "__main__"})
    assert "print(" not in block or capsys.readouterr().out


def test_the_readme_has_an_example():
    assert any(param.id == "README.md-0" for param in BLOCKS)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_pinned_tool_satisfies_what_the_package_declares():
    from packaging.requirements import Requirement

    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    for requirement in map(Requirement, declared):
        if requirement.name != "blockgate":
            assert requirement.specifier.contains(pins[requirement.name]), requirement


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_tables_are_those_of_the_result_files(page):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from fill_tables import filled
    finally:
        sys.path.pop(0)
    assert filled(page.read_text()) == page.read_text(), "Run: python benchmarks/fill_tables.py"


def test_the_readme_shows_measured_tables():
    assert "<!-- table of benchmarks/results/" in (ROOT / "README.md").read_text()
