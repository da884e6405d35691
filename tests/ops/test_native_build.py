"""The compiled extension keeps its promises: one binary for every Python from 3.10 and every torch from 2.10."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import blockgate
from blockgate.ops import native

LIBRARIES = list(Path(blockgate.__file__).parent.glob("_C*"))

pytestmark = pytest.mark.skipif(native.unavailable_reason() is not None, reason="native kernels are not built")


def test_it_is_built_for_the_stable_python_abi():
    assert [library.name for library in LIBRARIES] == ["_C.abi3.so"]


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_it_uses_nothing_of_torch_but_its_stable_abi():
    symbols = subprocess.run(["nm", "-D", "--undefined-only", LIBRARIES[0]], capture_output=True, text=True, check=True)
    unstable = re.findall(r"\bU (_ZNK?(?:2at|3c10|5torch)\S+)", symbols.stdout)
    assert not unstable


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_kernels_of_different_instruction_sets_share_no_symbol():
    # A merged inline function could carry AVX-512 code to a machine without it.
    symbols = subprocess.run(["nm", "-C", LIBRARIES[0]], capture_output=True, text=True, check=True)
    shared = [
        line
        for line in symbols.stdout.splitlines()
        if re.search(r" [WVu] .*\b(avx2|avx512|avx512vnni|baseline)\b", line)
    ]
    assert not shared
