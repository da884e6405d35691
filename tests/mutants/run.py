"""`make mutants`: puts one fault after the other into a copy of the source, and sees that the tests notice.

    python -m tests.mutants.run [WORDS...]
    python -m tests.mutants.run --log build/mutants.json --seconds 200    # goes on where the log ends

With words, only the faults whose file or text contains one of them. Takes about an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.mutants.listed import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
CHOICE = "BLOCKGATE_MUTANT"
DECLARATION = "namespace blockgate { extern const int mutant_in_use; }\n"
DEFINITION = f"""#include <cstdlib>
namespace blockgate {{
extern const int mutant_in_use;
const int mutant_in_use = std::getenv("{CHOICE}") ? std::atoi(std::getenv("{CHOICE}")) : 0;
}}
"""
PROBE = """
from pathlib import Path
import blockgate
from blockgate.ops import native
assert native.unavailable_reason() is None, native.unavailable_reason()
print(native.isa(), Path(blockgate.__file__).parent)
"""
# Written into a copy once it has all faults, and once it is built.
COPIED, READY = "copied.json", "ready.json"
# How pytest ends where tests ran and some failed; others mean that it did not run them.
TESTS_FAILED = 1


def mutated(mutant: Mutant, text: str, number: int) -> str:
    """The source with the fault in it; in native code only where the environment asks for its number."""
    put = f"(mutant_in_use == {number} ? ({mutant.new}) : ({mutant.old}))" if mutant.native else mutant.new
    if mutant.native and mutant.old.endswith("("):
        # The beginning of a condition.
        put = f"mutant_in_use != {number} && {mutant.old}"
    return text.replace(mutant.within, mutant.within.replace(mutant.old, put, 1), 1)


def copy_tree(target: Path) -> None:
    """The source and the tests, without what is built."""
    shutil.rmtree(target, ignore_errors=True)
    ignored = shutil.ignore_patterns(
        "*.so", "__pycache__", "build", ".git", ".venv*", "results", "study", "site", "dist"
    )
    shutil.copytree(ROOT, target, ignore=ignored)


def put_faults(target: Path) -> None:
    """All native faults, each asleep."""
    source = target / "src" / "blockgate" / "csrc"
    for number, mutant in enumerate(MUTANTS, 1):
        if mutant.native:
            path = target / mutant.file
            path.write_text(mutated_beside(mutant, path.read_text(), number))
    contract = source / "kernels.h"
    contract.write_text(contract.read_text().replace("namespace blockgate {", DECLARATION + "namespace blockgate {", 1))
    (source / "host" / "mutant.cpp").write_text(DEFINITION)
    for header in source.rglob("*.h"):
        text = header.read_text()
        if "mutant_in_use" in text and "kernels.h" not in text and header != contract:
            header.write_text(text.replace("#pragma once\n", "#pragma once\n" + DECLARATION, 1))
    for file in source.rglob("*.cpp"):
        text = file.read_text()
        if "mutant_in_use" in text and file.name != "mutant.cpp":
            file.write_text(DECLARATION + text)
    # Built sooner: the tests take longer than what is gained by more.
    setup = target / "setup.py"
    setup.write_text(setup.read_text().replace('"-O3"', '"-O1"'))


def build(target: Path) -> None:
    """Compiles the copy; goes on where an earlier call was stopped."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    ran = subprocess.run(command, cwd=target, capture_output=True, text=True)
    if ran.returncode or not list((target / "src" / "blockgate").glob("_C*")):
        raise SystemExit(f"the mutants don't compile:\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}")


def mutated_beside(mutant: Mutant, text: str, number: int) -> str:
    """As `mutated`, where an earlier fault may have changed the same piece of text already."""
    if mutant.within in text:
        return mutated(mutant, text, number)
    assert mutant.old in text, f"an earlier fault is in the way of {mutant}"
    put = f"(mutant_in_use == {number} ? ({mutant.new}) : ({mutant.old}))"
    return text.replace(mutant.old, put, 1)


def check_native(target: Path) -> str:
    """The instruction set of the copy's kernels. Without them their tests would be skipped, and fail or pass alike."""
    ran = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=target, env=environment(target, 0), capture_output=True, text=True
    )
    isa, _, folder = ran.stdout.strip().partition(" ")
    if ran.returncode or Path(folder) != target / "src" / "blockgate":
        raise SystemExit(f"the copy's native code does not run:\n{ran.stdout}{ran.stderr[-3000:]}")
    return isa


def check_tests(target: Path, tests: Iterable[str]) -> None:
    """Without a fault all tests must pass, or failing would mean nothing."""
    ran = run_tests(target, tests, 0)
    if ran.returncode:
        raise SystemExit(f"tests fail without a fault:\n{ran.stdout[-3000:]}")


def environment(target: Path, number: int) -> dict[str, str]:
    """That of tests in the copy, with one native fault awake; 0: none."""
    return {**os.environ, "PYTHONPATH": str(target / "src"), "PYTHONDONTWRITEBYTECODE": "1", CHOICE: str(number)}


def run_tests(target: Path, tests: Iterable[str], number: int) -> subprocess.CompletedProcess[str]:
    """The tests in the copy, with one native fault awake; 0: none."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    return subprocess.run(
        command, cwd=target, env=environment(target, number), capture_output=True, text=True, timeout=900
    )


def noticed_by(target: Path, mutant: Mutant, number: int) -> str:
    """Which test notices a fault, or how the process ends; empty if nothing does."""
    path, whole = target / mutant.file, (target / mutant.file).read_text()
    try:
        if not mutant.native:
            path.write_text(mutated(mutant, whole, number))
        ran = run_tests(target, mutant.tests, number if mutant.native else 0)
    except subprocess.TimeoutExpired:
        return "no end within 15 minutes"
    finally:
        path.write_text(whole)
    if not ran.returncode:
        return ""
    if ran.returncode < 0:
        return f"signal {-ran.returncode}"
    failed = [line.split(" ")[1] for line in ran.stdout.splitlines() if line.startswith("FAILED ")]
    if ran.returncode != TESTS_FAILED or not failed:
        # The source no longer imports, or a test is not there: nothing was tested.
        raise SystemExit(f"{mutant}: the tests did not run:\n{ran.stdout[-2000:]}\n{ran.stderr[-1000:]}")
    return failed[0]


def prepare(target: Path, *, native: bool) -> None:
    """The copy with its kernels: one that is there already, of this very source, or a new one."""
    state = {"commit": commit(), "native": native}
    if _says(target / READY, state):
        return
    if not _says(target / COPIED, state):
        copy_tree(target)
        if native:
            put_faults(target)
        (target / COPIED).write_text(json.dumps(state))
    if native:
        build(target)
    else:
        for kernels in (ROOT / "src" / "blockgate").glob("_C*"):
            shutil.copy2(kernels, target / "src" / "blockgate")
    check_native(target)
    (target / READY).write_text(json.dumps(state))


def _says(file: Path, state: dict[str, Any]) -> bool:
    return file.is_file() and json.loads(file.read_text()) == state


def commit() -> str:
    """The commit of the source, marked where files differ from it."""
    said = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return said.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--python", action="store_true", help="only the faults that need no build")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--log", type=Path, help="a JSON file of what was tried: nothing in it is tried again")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other fault after so long")
    arguments = parser.parse_args()
    start = time.monotonic()
    chosen = [
        (number, mutant)
        for number, mutant in enumerate(MUTANTS, 1)
        if not (arguments.python and mutant.native)
        and (not arguments.words or any(word in str(mutant) for word in arguments.words))
    ]
    prepare(arguments.folder, native=any(mutant.native for _, mutant in chosen))
    isa = check_native(arguments.folder)
    log: dict[str, Any] = {"faults": {}, "pass_without": {}}
    if arguments.log is not None and arguments.log.is_file():
        log = json.loads(arguments.log.read_text())
    for number, mutant in chosen:
        if str(mutant) in log["faults"] and log["faults"][str(mutant)]["by"]:
            continue
        if time.monotonic() - start > arguments.seconds:
            break
        unproven = [test for test in mutant.tests if test not in log["pass_without"]]
        if unproven:
            check_tests(arguments.folder, unproven)
            log["pass_without"] |= dict.fromkeys(unproven, commit())
        began = time.monotonic()
        by = noticed_by(arguments.folder, mutant, number)
        log["faults"][str(mutant)] = {"by": by, "isa": isa if mutant.native else "", "commit": commit()}
        print(f"{'caught  ' if by else 'SURVIVED'} {time.monotonic() - began:5.0f} s  {mutant}  {by}", flush=True)
        if arguments.log is not None:
            arguments.log.write_text(json.dumps(log, indent=1) + "\n")
    tried = [log["faults"][str(mutant)]["by"] for _, mutant in chosen if str(mutant) in log["faults"]]
    caught = sum(map(bool, tried))
    print(f"{caught} of {len(tried)} mutants were caught, {len(chosen) - len(tried)} are left")
    return 1 if caught < len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
