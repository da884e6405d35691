"""Imports point one way, files stay readable, and the core needs torch alone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import blockgate

PACKAGE = Path(blockgate.__file__).parent

# Each room may import from those before it, and from itself. The modules of one inner tuple share a level.
LEVELS: list[tuple[str, ...]] = [
    ("_version", "changes", "errors"),
    ("grid",),
    ("formats",),
    ("ops",),
    ("spec",),
    ("gates",),
    ("find", "runtime"),
    ("layers",),
    ("schedule",),
    ("convert",),
    ("checkpoint",),
    ("inspect", "integrations"),
    ("__init__",),
    ("lab",),
    ("cli",),
    ("__main__",),
]
# The laboratory has levels of its own.
LAB_LEVELS: list[tuple[str, ...]] = [
    ("__init__",),
    ("baselines", "data"),
    ("models",),
    ("training", "bench", "selftest"),
    ("reproduce", "demo"),
]
FILES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES = 320


def level_of(levels: list[tuple[str, ...]], room: str) -> int:
    found = [level for level, rooms in enumerate(levels) if room in rooms]
    assert found, f"{room} has no level here"
    return found[0]


def rooms_of(module: str) -> list[str]:
    """The room of a module below blockgate, and inside the laboratory its room there."""
    return [*module.split(".")[1:], "__init__", "__init__"][:2]


def imported_modules(file: Path) -> set[str]:
    """Names of blockgate's modules that a file imports, with `from blockgate import x` resolved to the module x."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            if node.module == "blockgate":
                names |= {f"blockgate.{alias.name}" for alias in node.names}
            else:
                names.add(node.module)
    return {name for name in names if name.split(".")[0] == "blockgate"}


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_point_one_way(file):
    here = rooms_of(".".join(("blockgate", *file.relative_to(PACKAGE).with_suffix("").parts)))
    for module in imported_modules(file):
        there = rooms_of(module)
        levels, room, other = LEVELS, here[0], there[0]
        if room == other == "lab":
            levels, room, other = LAB_LEVELS, here[1], there[1]
        allowed = level_of(levels, other) < level_of(levels, room) or other == room
        assert allowed, f"{file.relative_to(PACKAGE)} must not import {module}"


def test_files_stay_readable():
    sources = [*FILES, *(f for f in PACKAGE.glob("csrc/**/*") if f.is_file()), *Path(__file__).parent.rglob("*.py")]
    long = {str(f): n for f in sources if (n := len(f.read_text().splitlines())) > MOST_LINES}
    assert not long


# Folders of csrc/ that each folder may include from; the contract lies above them all.
NATIVE_ROOMS = {"isa": {"isa"}, "host": {"host"}, "bind": {"bind", "host"}}
NATIVE_FILES = sorted((PACKAGE / "csrc").rglob("*.*"))


def included_rooms(file: Path) -> set[str]:
    """The folders of csrc/ that a file includes from; "contract" for a header above them, "torch" for its headers."""
    rooms = set()
    for bracket, name in re.findall(r'^\s*#\s*include\s*([<"])([^">]+)', file.read_text(), re.MULTILINE):
        if bracket == '"':
            assert (PACKAGE / "csrc" / name).is_file(), f"{file}: {name} is not a path below csrc/"
            rooms.add(name.split("/")[0] if "/" in name else "contract")
        elif name.startswith(("torch/", "ATen/", "c10/")):
            rooms.add("torch")
    return rooms


@pytest.mark.parametrize("file", NATIVE_FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_native_includes_point_one_way(file):
    room = file.relative_to(PACKAGE / "csrc").parts[0] if file.parent != PACKAGE / "csrc" else "contract"
    allowed = {"contract", *NATIVE_ROOMS.get(room, ())} | ({"torch"} if room in {"host", "bind"} else set())
    assert included_rooms(file) <= allowed


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_core_imports_nothing_but_torch():
    code = """
import sys
import torch
before = set(sys.modules)
import blockgate
assert not any(name.startswith(("blockgate.lab", "blockgate.cli")) for name in sys.modules)
new = {name.split(".")[0] for name in set(sys.modules) - before}
extras = {"tyro", "rich", "safetensors", "triton", "lightning", "lightning_fabric", "matplotlib", "pooch", "hypothesis"}
extras |= {"transformers"}
assert not new & extras, new & extras
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_without_native_kernels_the_reference_serves_and_says_so_once():
    code = """
import sys
sys.modules["blockgate._C"] = None  # importing it fails
import torch, blockgate as bg
layers = [bg.DynamicSparseLinear(8, 8, block_size=2) for _ in range(3)]
assert layers[0](torch.randn(2, 8)).shape == (2, 8)
try:
    bg.DynamicSparseLinear(8, 8, backend="cpu")
except bg.errors.BackendError as error:
    print(error)
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("backend 'auto' runs: reference") == 1
    assert "backend 'cpu': expected native kernels, got none: the native kernels were not built" in result.stdout
