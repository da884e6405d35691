"""What the documentation says runs: Python blocks as they stand, commands as far as they can, pictures and tables."""

from __future__ import annotations

import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from blockgate.cli import _commands, parse
from blockgate.lab.training.launch import check_run

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONTINUES = "<!-- continues -->\n"

# Lines of sh blocks that aren't run, by what they begin with, and why. Those of blockgate must be accepted anyway.
NOT_RUN = {
    "pip install": "what these tests run in has been installed",
    "make": "these tests are part of it",
    "blockgate data fetch": "needs the network",
    "blockgate train": "takes 20 minutes; tests/cli trains tiny models",
    "blockgate evaluate": "needs what train has trained; tests/cli does that",
    "blockgate generate": "needs what train has trained; tests/cli does that",
    "blockgate atlas": "needs what train has trained; tests/cli does that",
    "blockgate bench": "takes minutes; tests/bench measures at toy size",
    "torchrun": "takes two machines; tests/tools/two_hosts.py makes some",
    "srun": "takes a cluster; tests/lab/reproduce/test_slurm.py makes one",
    "blockgate demo": "takes minutes, and opens a page",
    "blockgate reproduce": "takes a minute at the least; tests/reproduce does that",
    "blockgate selftest": "takes a minute at the least; tests/lab/selftest judges a few problems",
}


def python_blocks(page: Path) -> list[str]:
    """The programs of a page: its Python blocks, with those that continue put behind those that they continue."""
    programs: list[str] = []
    for continues, block in re.findall(rf"({CONTINUES})?```python\n(.*?)```", page.read_text(), re.DOTALL):
        if continues:
            programs[-1] += block
        else:
            programs.append(block)
    return programs


PROGRAMS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(python_blocks(page))
]
COMMANDS = [
    pytest.param(line, id=f"{page.name}: {line}")
    for page in PAGES
    for block in re.findall(r"```(?:sh|bash|console)\n(.*?)```", page.read_text(), re.DOTALL)
    for line in (line.split(" #")[0].strip() for line in block.replace("\\\n", " ").splitlines())
    if line and not line.startswith("#")
]


def examples_of_help() -> list[str]:
    """The example lines that the help of every command shows."""
    texts = [command.__doc__ or "" for command in _commands([]).values()]
    return [line.strip() for text in texts for line in text.splitlines() if line.strip().startswith("blockgate ")]


@pytest.mark.parametrize("block", PROGRAMS)
def test_code_block_runs(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "<documentation>", "exec"), {"__name__": "__main__"})
    assert "print(" not in block or capsys.readouterr().out


def test_the_readme_has_an_example():
    assert any(param.id == "README.md-0" for param in PROGRAMS)


@pytest.mark.parametrize("line", COMMANDS)
def test_command_runs_or_says_why_not(line, tmp_path):
    if reason(line):
        accept(line, tmp_path)
        return
    places = [Path(sys.executable).parent, os.environ["PATH"]]
    environment = os.environ | {"PATH": os.pathsep.join(map(str, places))}
    done = subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", examples_of_help())
def test_examples_of_help_are_accepted(line, tmp_path):
    accept(line, tmp_path)


def reason(line: str) -> str:
    """Why a line isn't run; empty if it is. Lists of arms and help pages cost nothing."""
    if re.search(r"--(list|help)\b", line):
        return ""
    return next((why for beginning, why in NOT_RUN.items() if line.startswith(beginning)), "")


def accept(line: str, folder: Path) -> None:
    """Lets the command line of blockgate read a line; config files that it names are put into `folder`.

    What it is to train must be a run that as many processes can share as the line starts.
    """
    program, *words = shlex.split(line.partition(" > ")[0])
    launcher: list[str] = []
    if program in {"torchrun", "srun"} and "blockgate" in words:
        start = words.index("blockgate")
        launcher, program, words = words[:start], "blockgate", words[start + 1 :]
    if program == "blockgate" and words[0] in _commands([]):
        (folder / "my-config.json").write_text('{"base": "ptb-lstm-laptop"}')
        command = parse([str(folder / word) if word == "my-config.json" else word for word in words])
        if words[0] == "train":
            with pytest.MonkeyPatch.context() as patch:
                for name, value in environment_of(launcher).items():
                    patch.setenv(name, value)
                check_run(replace(command.config, output=folder / "run", resume=False))


def environment_of(launcher: list[str]) -> dict[str, str]:
    """What torchrun or srun tell the processes that they start, of how many there are."""
    options = dict(itertools.pairwise(launcher))
    nodes = options.get("--nnodes") or options.get("--nodes")
    if nodes is None:
        return {}
    each = options.get("--nproc-per-node") or options["--ntasks-per-node"]
    world = str(int(nodes) * int(each))
    if "--nnodes" in options:
        return {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": each, "WORLD_SIZE": world}
    return {"SLURM_NTASKS": world, "SLURM_NNODES": nodes, "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_public_name_is_in_the_reference():
    import blockgate

    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    for name in set(blockgate.__all__) - {"__version__", "errors"}:
        assert f"::: blockgate.{name}\n" in pages, name


def test_pictures_are_those_that_the_script_draws(tmp_path, monkeypatch):
    script = ROOT / "docs" / "pictures" / "draw.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--output", str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    drawn = {file.name: file.read_text() for file in tmp_path.glob("*.svg")}
    assert drawn == {file.name: file.read_text() for file in script.parent.glob("*.svg")}


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
