"""The baseline kernels without torch: on this machine, and on ARM64 where a cross-compiler and qemu are installed."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import blockgate
from tests.aarch64.make_results import KINDS, RESULTS, from_bytes, problems

SOURCES = Path(blockgate.__file__).parent / "csrc"
DRIVER = Path(__file__).with_name("driver.cpp")
# As setup.py builds them, but for -O3, which would take twice as long.
FLAGS = ["-std=c++20", "-O2", "-ffp-contract=fast", "-Wno-psabi", f"-I{SOURCES}"]
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
ABSENT = [tool for tool in (CROSS, EMULATOR) if shutil.which(tool) is None]


def build(compiler: str, output: Path, *flags: str) -> Path:
    sources = [str(DRIVER), str(SOURCES / "isa" / "kernels_baseline.cpp")]
    subprocess.run([compiler, *FLAGS, *flags, *sources, "-o", str(output)], check=True)
    return output


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    if shutil.which("g++") is None or platform.machine() not in {"x86_64", "aarch64"}:
        pytest.skip("no g++, or a machine that the kernels are not for")
    return build("g++", tmp_path_factory.mktemp("driver") / "driver")


def test_the_stored_results_are_those_of_the_reference():
    stored, made = from_bytes(RESULTS.read_bytes()), problems()
    assert stored.keys() == made.keys()
    for name, tensor in made.items():
        kind, data = stored[name]
        assert kind == KINDS[tensor.dtype], name
        if not tensor.numel():
            assert not data
            continue
        found = torch.frombuffer(bytearray(data), dtype=tensor.dtype).view(tensor.shape)
        if kind in "fd":
            # Sums of another version of torch may be rounded in another order.
            torch.testing.assert_close(found, tensor, rtol=1e-5 if kind == "f" else 1e-12, atol=1e-5)
        else:
            assert torch.equal(found, tensor), name


def test_on_this_machine(driver):
    done = run(driver, RESULTS)
    assert done.returncode == 0, done.stdout
    assert "0 wrong" in done.stdout.splitlines()[-1]
    assert done.stdout.count("the same bits") == 2 * len(blockgate.formats.FORMATS)


@pytest.mark.parametrize(
    "name",
    [
        "linear.thin.f64.grad_weight",
        "packed.ragged.int4.blocks",
        "topk.margin.4.3.f32.gates",
        "lstm.f32.h",
        "gru.f64.h",
    ],
)
def test_the_driver_notices_what_is_wrong(driver, name, tmp_path):
    data = bytearray(RESULTS.read_bytes())
    place = data.index(name.encode()) + len(name) + 9
    # The middle of the array: one sign, or one stored weight.
    middle = place + int.from_bytes(data[place - 8 : place], "little") // 16 * 8 + 7
    data[middle] ^= 0x80
    (tmp_path / "results.bin").write_bytes(data)
    done = run(driver, tmp_path / "results.bin")
    assert done.returncode == 1
    assert "WRONG" in done.stdout


def test_bad_files_are_told(driver, tmp_path):
    (tmp_path / "short.bin").write_bytes(RESULTS.read_bytes()[:1000])
    assert run(driver, tmp_path / "short.bin").returncode == 2
    assert run(driver, tmp_path / "none.bin").returncode == 2


@pytest.mark.slow
@pytest.mark.skipif(bool(ABSENT), reason=f"no {' and no '.join(ABSENT)}: apt install g++-aarch64-linux-gnu qemu-user")
def test_on_aarch64(tmp_path):
    done = run(EMULATOR, build(CROSS, tmp_path / "driver", "-static"), RESULTS)
    assert done.returncode == 0, done.stdout
    assert "0 wrong" in done.stdout.splitlines()[-1]
