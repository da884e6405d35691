"""One more portion of the selftest, for machines that never have an hour to themselves.

    python benchmarks/selftest_portions.py --isa avx512vnni --minutes 3 --output benchmarks/results/selftest_NAME.json

Goes on from the seeds that the file has for this instruction set, adds what it finds with the commit, and counts the
totals anew. Portions of other commits stay as they were.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

COUNTS = ("problems", "comparisons", "elements", "near_ties", "equalities", "mistrusted", "undetermined")
# Each instruction set has seeds of its own, so that no two judge the same problems.
FIRST = {"avx512vnni": 10_000_000, "avx512": 20_000_000, "avx2": 30_000_000, "baseline": 40_000_000}
# Portions that run at the same time take their seeds so far apart.
APART = 100_000


def commit() -> str:
    """The commit of the source; "-dirty" where it differs."""
    said = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    return said.stdout.strip()


def totals(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """By instruction set: counts, failures and the worst errors."""
    found: dict[str, Any] = {}
    for part in parts:
        total = found.setdefault(
            part["isa"], {**dict.fromkeys(COUNTS, 0), "differences": 0, "worst": {}, "by_layer": {}}
        )
        for name in COUNTS:
            total[name] += part[name]
        total["differences"] += len(part["failures"])
        for kind, worst in part["worst"].items():
            total["worst"][kind] = max(total["worst"].get(kind, 0), round(worst, 3))
        for layer, count in part["by_layer"].items():
            total["by_layer"][layer] = total["by_layer"].get(layer, 0) + count
    return found


def main() -> None:
    """Runs the portion."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", required=True, choices=FIRST)
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    claims = arguments.output.with_suffix(".claims")
    with claims.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = [line.split() for line in file.read().splitlines()]
        stored = json.loads(arguments.output.read_text())["parts"] if arguments.output.is_file() else []
        taken = [int(seed) for isa, seed in known if isa == arguments.isa]
        taken += [part["seeds"][0] for part in stored if part["isa"] == arguments.isa]
        # The first portion has the boundary shapes.
        first = max(*taken, FIRST[arguments.isa]) + APART if taken else 0
        file.write(f"{arguments.isa} {first}\n")
    at = commit()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        words = ["--isa", arguments.isa, "--minutes", str(arguments.minutes), "--seed", str(first)]
        command = [sys.executable, "-m", "blockgate", "selftest", *words, "--output", str(result)]
        # 1: differences were found, which the file tells.
        ran = subprocess.run(command)
        if ran.returncode not in {0, 1}:
            raise SystemExit(ran.returncode)
        found = json.loads(result.read_text())
    part = {"isa": arguments.isa, "commit": at, **found["results"][arguments.isa]}
    del part["worst_of"]
    with claims.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        parts = json.loads(arguments.output.read_text())["parts"] if arguments.output.is_file() else []
        parts.append(part)
        whole = {"what": "blockgate selftest, in portions", **found["machine"], "total": totals(parts), "parts": parts}
        arguments.output.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
