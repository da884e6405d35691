"""Looks into a wheel before it is uploaded, or tries it in an empty environment: see docs/releasing.md.

python tests/tools/check_wheel.py dist/*.whl
python tests/tools/check_wheel.py --try 'torch==2.10.*' dist/*.whl
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = "blockgate/_C.abi3.so"
# torch's own libraries are loaded by then; the others are part of every Linux.
NEEDED = {"libc10.so", "libtorch_cpu.so", "libtorch.so"}
NEEDED |= {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6"}
LINKER = re.compile(r"ld-linux-[\w-]+\.so\.\d")

TRIAL = """
import torch, blockgate as bg
from blockgate.ops import native

torch.manual_seed(0)
print("torch", torch.__version__, "kernels", native.isa())
x = torch.randn(7, 96)
for block in (16, (32, 4)):
    one = bg.DynamicSparseLinear(96, 64, block_size=block, sparsity=0.5, backend="cpu")
    other = bg.DynamicSparseLinear(96, 64, block_size=block, sparsity=0.5, backend="reference")
    other.load_state_dict(one.state_dict())
    for model in (one, other):
        model(x).square().sum().backward()
    torch.testing.assert_close(one(x), other(x), rtol=1e-4, atol=1e-5)
    for a, b in zip(one.parameters(), other.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4)
    with torch.inference_mode():
        one.eval(), other.eval()
        for form in ("float32", "bfloat16", "float16", "int8", "int8a8", "int4"):
            torch.testing.assert_close(bg.pack(one, form)(x), other(x), rtol=0.2, atol=0.2)
lstm = bg.DynamicSparseLSTM(96, 64, 2, block_size=16, sparsity=0.5, backend="cpu").eval()
plain = bg.DynamicSparseLSTM(96, 64, 2, block_size=16, sparsity=0.5, backend="reference").eval()
plain.load_state_dict(lstm.state_dict())
with torch.inference_mode():
    torch.testing.assert_close(lstm(x[:, None])[0], plain(x[:, None])[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(bg.pack(lstm)(x[:, None])[0], plain(x[:, None])[0], rtol=1e-4, atol=1e-5)
    with bg.record_gates(lstm, trace=7) as record:
        lstm(x[:, None])
record.to_html("atlas.html")
print("works")
"""


def faults(wheel: Path) -> list[str]:
    """What is wrong with a wheel, a line each."""
    found = []
    name = wheel.name.removesuffix(".whl").split("-")
    if name[2:4] != ["cp310", "abi3"]:
        found.append(f"expected a wheel for cp310-abi3, got {'-'.join(name[2:4])}")
    if "manylinux" not in name[-1]:
        found.append(f"expected a manylinux wheel, got {name[-1]}; auditwheel makes one")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = set(archive.namelist())
        if KERNELS not in names:
            return [*found, f"no {KERNELS}: it was built without kernels"]
        package = ROOT / "src" / "blockgate"
        expected = {*package.rglob("*.py"), *package.rglob("*.html"), *package.rglob("*.css"), *package.rglob("*.js")}
        expected |= {*package.rglob("*.json"), package / "py.typed"}
        found += [
            f"{file.relative_to(package)} is missing"
            for file in sorted(expected)
            if f"blockgate/{file.relative_to(package).as_posix()}" not in names
        ]
        # Libraries that auditwheel copied would be second ones beside torch's.
        found += [f"{one} has no place here" for one in names if one.startswith("blockgate.libs/") or "/tests/" in one]
        found += library_faults(Path(archive.extract(KERNELS, folder)))
    return found


def library_faults(library: Path) -> list[str]:
    """What is wrong with the compiled kernels."""
    dynamic = read("readelf", "--dynamic", "--wide", library)
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", dynamic))
    found = [f"kernels need {one}" for one in sorted(needed) if one not in NEEDED and not LINKER.fullmatch(one)]
    if re.search(r"\((RPATH|RUNPATH)\)", dynamic):
        found.append("kernels have a search path of the machine that built them")
    if re.search(rb"/(root|home|tmp|work)/[\w./-]+\.(cpp|h)\b", library.read_bytes()):
        found.append("kernels name folders of the machine that built them")
    return found


def floors(library: Path) -> dict[str, str]:
    """The newest version of each system library that the kernels ask for."""
    asked = re.findall(r"\b(GLIBC|GLIBCXX|CXXABI|GOMP)_([\d.]+)", read("objdump", "--dynamic-syms", library))
    versions = {kind: [tuple(map(int, v.split("."))) for k, v in asked if k == kind] for kind in {k for k, _ in asked}}
    return {kind: ".".join(map(str, max(numbers))) for kind, numbers in sorted(versions.items())}


def try_out(wheel: Path, torch: str) -> None:
    """Installs the wheel into an empty environment with this torch, and runs it there."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = Path(folder, "bin", "python")
        for what in ([torch], ["--no-deps", str(wheel.resolve())]):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *what], check=True)
        subprocess.run([python, "-W", "ignore", "-c", TRIAL], check=True, cwd=folder)


def read(*command: object) -> str:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--try", dest="torch", help="a torch to try it with, as pip names it")
    options = parser.parse_args()
    wrong = 0
    for wheel in options.wheels:
        if options.torch:
            try_out(wheel, options.torch)
            continue
        found = faults(wheel)
        wrong += len(found)
        print(f"{wheel.name}: {'; '.join(found) or 'good'}")
        if not found:
            with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
                print(f"  asks for {floors(Path(archive.extract(KERNELS, folder)))}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
