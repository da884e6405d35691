"""Gates: small trained networks that decide, for every input, which blocks of a weight matrix open."""

from __future__ import annotations

import importlib
import pkgutil

from blockgate.gates.base import Gate
from blockgate.gates.means import share_means
from blockgate.gates.registry import gate_kinds, make_gate, register_gate
from blockgate.gates.revive import BlockReviver

# Every file of this folder is imported, so that a kind is known by lying here.
for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")

__all__ = ["BlockReviver", "Gate", "gate_kinds", "make_gate", "register_gate", "share_means"]
