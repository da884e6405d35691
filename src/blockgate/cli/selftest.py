"""`blockgate selftest`: the library against an independent formula, on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from blockgate.checkpoint.atomic import write_whole
from blockgate.cli.output import print_markdown
from blockgate.errors import BlockgateError, invalid, missing_extra
from blockgate.grid import check_size
from blockgate.lab.bench.machine import describe
from blockgate.ops import native

__all__ = ["Selftest"]

INSTRUCTION_SETS = ("avx512vnni", "avx512", "avx2", "baseline")


@dataclass(frozen=True, kw_only=True, slots=True)
class Selftest:
    """Compares every layer, gate kind, packed format and path with an independent float64 formula, on this machine.

    Problems are drawn from seeds, boundary shapes first. A comparison is one output or gradient tensor of the library
    against the formula; the error is told in units of eps times the sum of absolute terms, and at most 4 are allowed.
    A difference is printed with the simplest problem that shows it. Ends with code 1 if there was one.

    For example:
        blockgate selftest --minutes 1
        blockgate selftest --minutes 60 --seed 100000 --output selftest.json
        blockgate selftest --comparisons 1000000 --isa baseline
    """

    minutes: float | None = None
    """Minutes for all instruction sets together. Default: 1, unless --comparisons is given."""
    comparisons: int | None = None
    """Stop after so many comparisons for each instruction set."""
    seed: int = 0
    """The first seed. Each instruction set goes on from it in its own problems."""
    isa: str = "all"
    """avx512vnni, avx512, avx2 or baseline; or all that this machine has, one after the other."""
    output: Path | None = None
    """A file for the results as JSON."""
    json: bool = False
    """Print the results as JSON, for scripts."""

    def run(self) -> None:
        """Runs, with progress on stderr, and prints the table."""
        if self.minutes is not None and not self.minutes > 0:
            raise invalid("--minutes", expected="more than 0", got=self.minutes, remedy="1 is a good beginning.")
        if self.comparisons is not None:
            check_size("--comparisons", self.comparisons)
        if self.seed < 0:
            raise invalid("--seed", expected="a number from 0", got=self.seed, remedy="Any will do.")
        known = ("all", *INSTRUCTION_SETS)
        if self.isa not in known:
            raise invalid("--isa", expected=f"one of {', '.join(known)}", got=self.isa, remedy="The default is all.")
        names = _available(INSTRUCTION_SETS if self.isa == "all" else (self.isa,))
        results = {name: self._run_apart(name, len(names)) for name in names}
        found = {"machine": describe(), "results": results}
        if self.output is not None:
            write_whole(self.output, json.dumps(found, indent=1) + "\n")
        if self.json:
            print(json.dumps(found, indent=1))
        else:
            print_markdown(_table(results))
        for result in results.values():
            for failure in result["failures"]:
                print(failure, file=sys.stderr)
        if any(result["status"] == "failed" for result in results.values()):
            raise SystemExit(1)

    def _run_apart(self, name: str, share: int) -> dict[str, Any]:
        """One instruction set in a process of its own: it is chosen when the kernels are first used."""
        minutes = self.minutes if self.minutes is not None or self.comparisons else 1.0
        order = {
            "first": self.seed,
            "seconds": None if minutes is None else 60 * minutes / share,
            "comparisons": self.comparisons,
        }
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if name != "reference":
            environment["BLOCKGATE_ISA"] = name
        with tempfile.TemporaryDirectory() as folder, Console(stderr=True).status(f"{name} ..."):
            file = Path(folder) / "result.json"
            command = [sys.executable, "-m", "blockgate.lab.selftest", json.dumps(order), str(file)]
            ran = subprocess.run(command, env=environment, capture_output=True, text=True)
            if ran.returncode or not file.is_file():
                # A crash of native code is the worst finding of all.
                raise BlockgateError(
                    f"selftest of {name}: expected a result, got exit code {ran.returncode}: "
                    f"{ran.stderr.strip()[-500:]}. Report this with the output of `blockgate info`."
                )
            result: dict[str, Any] = json.loads(file.read_text())
        return result


def _available(names: tuple[str, ...]) -> list[str]:
    """The instruction sets among these that this machine has."""
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        raise missing_extra("the selftest", error) from None
    if native.unavailable_reason() is not None:
        return ["reference"]
    probe = "from blockgate.ops import native; print(native.isa())"
    found = []
    for name in names:
        environment = os.environ | {"BLOCKGATE_ISA": name}
        ran = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, text=True)
        if ran.stdout.strip() == name:
            found.append(name)
    if not found:
        raise invalid("--isa", expected="one that this machine has", got=names, remedy="Leave it out.")
    return found


def _table(results: dict[str, dict[str, Any]]) -> str:
    """The results of all instruction sets as Markdown."""
    lines = [
        "| instruction set | status | problems | comparisons | numbers | near ties | mistrusted | undetermined |",
        "|---|---|---|---|---|---|---|---|",
    ]
    kinds: dict[str, dict[str, float]] = {}
    for name, r in results.items():
        counts = (r["problems"], r["comparisons"], r["elements"], r["near_ties"], r["mistrusted"], r["undetermined"])
        lines.append(f"| {name} | {r['status']} | " + " | ".join(f"{count:,}" for count in counts) + " |")
        for kind, worst in r["worst"].items():
            kinds.setdefault(kind, {})[name] = worst
    lines += [
        "",
        f"Worst error, in eps times the sum of absolute terms; {next(iter(results.values()))['limit']:g} are allowed:",
        "",
    ]
    lines += ["| | " + " | ".join(results) + " |", "|---" * (len(results) + 1) + "|"]
    for kind in sorted(kinds):
        lines.append(f"| {kind} | " + " | ".join(f"{kinds[kind].get(name, 0):.2f}" for name in results) + " |")
    return "\n".join(lines)
