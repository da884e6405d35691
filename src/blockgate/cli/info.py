"""`blockgate info`: what runs on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass

from blockgate.cli.output import print_facts
from blockgate.lab.bench.machine import describe
from blockgate.ops import describe_auto, describe_gpu

__all__ = ["Info", "environment"]


def environment() -> dict[str, str | int | None]:
    """The machine as every report shows it, and which backend runs on it, with the reason."""
    return {
        **describe(),
        "backend": describe_auto(),
        "backend on a GPU": describe_gpu(),
        "BLOCKGATE_ISA": os.environ.get("BLOCKGATE_ISA"),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Info:
    """Shows versions, the backend and its instruction set, and the number of threads."""

    json: bool = False
    """Print JSON, for scripts."""

    def run(self) -> None:
        """Prints the facts, one a line."""
        print_facts(environment(), as_json=self.json)
