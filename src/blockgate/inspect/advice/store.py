"""Times that were measured before, on disk: the same machine need not measure the same layer twice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from blockgate._version import __version__
from blockgate.checkpoint.atomic import write_whole
from blockgate.inspect.advice.measure import Times, Way
from blockgate.inspect.timing import cpu_name
from blockgate.ops import native

__all__ = ["Store", "default_store"]


def default_store() -> Path:
    """The file that times are kept in: below XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockgate" / "advice.json"


class Store:
    """Times by machine, layer and way; an empty one where the file is missing or can't be read.

    Args:
        path: of the JSON file; None keeps nothing.
        again: do as if nothing of this machine were known, until it is measured again.
    """

    def __init__(self, path: Path | None, again: bool = False) -> None:
        self.path = path
        self.again: set[tuple[str, str]] | None = set() if again else None
        self.machine = ", ".join([
            cpu_name(),
            native.isa() or "reference",
            f"{torch.get_num_threads()} threads",
            f"torch {torch.__version__}",
            f"blockgate {__version__}",
            # Other kernels take other times.
            f"kernels {native.build_digest() or 'none'}",
        ])
        self.known: dict[str, dict[str, dict[str, list[float]]]] = {}
        if path is not None and path.is_file():
            try:
                self.known = json.loads(path.read_text())
                self.known.get(self.machine, {}).items()
            except (OSError, ValueError, AttributeError):
                self.known = {}

    def get(self, layer: str, ways: Iterable[Way]) -> dict[Way, Times]:
        """The times of a layer in those of these ways that were measured."""
        found = self.known.get(self.machine, {}).get(layer, {})
        known = [way for way in ways if len(found.get(str(way), ())) == 2]
        return {way: Times(*found[str(way)]) for way in known if self.again is None or (layer, str(way)) in self.again}

    def put(self, layer: str, times: Mapping[Way, Times]) -> None:
        """Adds the times of a layer, and writes the file at once: an interrupted run is not measured again."""
        of_layer = self.known.setdefault(self.machine, {}).setdefault(layer, {})
        of_layer |= {str(way): [found.warm, found.cold] for way, found in times.items()}
        if self.again is not None:
            self.again |= {(layer, str(way)) for way in times}
        if self.path is not None:
            write_whole(self.path, json.dumps(self.known, indent=1))
