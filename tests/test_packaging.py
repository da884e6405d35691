"""What is given to others is whole: kernels where they are promised, an sdist with all that a clone has, workflows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from blockgate import __version__
from tests.tools.check_wheel import KERNELS, faults, floors, library_faults

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def copy_of_sources(folder: Path) -> Path:
    """What a build reads, apart from this clone; one kernel file is enough to fail on."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    kernels = folder / "src" / "blockgate" / "csrc" / "bind"
    kernels.mkdir(parents=True)
    shutil.copy(ROOT / "src" / "blockgate" / "_version.py", kernels.parents[1])
    (kernels.parents[1] / "__init__.py").write_text("")
    (kernels / "broken.cpp").write_text("this is no C++")
    return folder


def build(folder: Path, code: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    program = f"import sys; sys.argv = ['setup.py', '-q', 'build_ext']; {code} exec(open('setup.py').read())"
    return subprocess.run(
        [sys.executable, "-c", f"__file__ = 'setup.py'; {program}"],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("code", ["", "sys.modules['torch'] = None;"], ids=["does not compile", "no torch"])
def test_a_build_without_kernels_is_told_and_an_error_where_they_are_required(code, tmp_path):
    folder = copy_of_sources(tmp_path)
    done = build(folder, code)
    assert done.returncode == 0, done.stderr
    assert "installing WITHOUT native kernels" in done.stderr
    done = build(folder, code, BLOCKGATE_REQUIRE_KERNELS="1")
    assert done.returncode != 0
    assert "BLOCKGATE_REQUIRE_KERNELS is set" in done.stderr
    assert build(folder, code, BLOCKGATE_REQUIRE_KERNELS="0").returncode == 0


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The names in an sdist, without its folder."""
    folder = tmp_path_factory.mktemp("sdist")
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder, "sdist", "--dist-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def test_an_sdist_has_all_that_git_has(sdist):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a clone")
    # The runs behind the tables are large, and hidden files are for clones.
    apart = ("benchmarks/study/", ".")
    missing = {name for name in listed.stdout.splitlines() if not name.startswith(apart)} - sdist
    assert not missing
    assert not [name for name in sdist if name.endswith((".so", ".pyc"))]


def test_the_kernels_here_need_only_torch_and_the_system():
    library = ROOT / "src" / KERNELS
    if sys.platform != "linux" or not library.is_file() or shutil.which("readelf") is None:
        pytest.skip("no compiled kernels, or no readelf")
    if os.environ.get("BLOCKGATE_SANITIZE") or "asan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("a build for sanitizers")
    # Folders of this machine may be named in what is built for it alone.
    assert not [one for one in library_faults(library) if one.startswith("kernels need")]
    asked = floors(library)
    # torch brings its own OpenMP: kernels must not start another.
    assert "GOMP" not in asked
    assert {"GLIBC", "GLIBCXX"} <= asked.keys()


@pytest.mark.parametrize(
    ("name", "files", "said"),
    [
        ("blockgate-1-py3-none-any.whl", [], ["expected a wheel for cp310-abi3", "built without kernels"]),
        ("blockgate-1-cp310-abi3-linux_x86_64.whl", [], ["expected a manylinux wheel"]),
        (
            "blockgate-1-cp310-abi3-manylinux_2_34_x86_64.whl",
            [KERNELS, "blockgate.libs/libgomp.so"],
            ["cli/atlas.py is missing", "inspect/atlas/main.js is missing", "blockgate.libs/libgomp.so has no place"],
        ),
    ],
)
def test_what_is_wrong_with_a_wheel_is_found(name, files, said, tmp_path):
    library = ROOT / "src" / KERNELS
    if not library.is_file() or shutil.which("readelf") is None:
        pytest.skip("no compiled kernels, or no readelf")
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        for file in files:
            archive.writestr(file, library.read_bytes() if file == KERNELS else b"")
    found = "; ".join(faults(tmp_path / name))
    assert all(text in found for text in said), found


def test_this_version_has_its_entry_in_the_changelog():
    first = re.search(r"^## (\S+) \((\d{4}-\d\d-\d\d|unreleased)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first
    assert first[1] == __version__
    assert f"version: {__version__}" in (ROOT / "CITATION.cff").read_text()


def commands_of(workflow: Path) -> list[str]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.name)
def test_workflows_run_what_the_makefile_has(workflow):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    wanted = re.findall(r"\bmake ([\w-]+)", "\n".join(commands_of(workflow)))
    assert wanted
    assert set(wanted) <= set(targets)


def test_workflows_are_there_for_tests_and_wheels_on_both_processors():
    assert [file.name for file in WORKFLOWS] == ["tests.yml", "wheels.yml"]
    for file in WORKFLOWS:
        text = file.read_text()
        assert re.search(r"runner: ubuntu-[\d.]+-arm,", text)
        assert re.search(r"runner: ubuntu-[\d.]+,", text)


def test_what_the_notes_on_releasing_tell_to_run_is_there():
    page = (ROOT / "docs" / "releasing.md").read_text()
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    wanted = set(re.findall(r"\bmake ([\w-]+)", page))
    assert {"wheels", "try-wheel", "aarch64", "test"} <= wanted <= set(targets)
