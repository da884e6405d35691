"""`blockgate info`: what runs on this machine."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass

import torch

from blockgate._version import __version__
from blockgate.ops import describe_auto, native

__all__ = ["Info", "environment"]


def environment() -> dict[str, str | int | None]:
    """Versions, backend, instruction set and threads, as every report shows them."""
    return {
        "blockgate": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "backend": describe_auto(),
        "instruction set": native.isa(),
        "BLOCKGATE_ISA": os.environ.get("BLOCKGATE_ISA"),
        "threads": torch.get_num_threads(),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Info:
    """Shows versions, the backend and its instruction set, and the number of threads."""

    json: bool = False
    """Print JSON, for machines."""

    def run(self) -> None:
        """Prints the facts, one a line."""
        facts = environment()
        if self.json:
            print(json.dumps(facts, indent=2))
            return
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"{name:<{width}}  {'-' if value is None else value}")
