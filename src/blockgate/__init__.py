"""Block-wise dynamic sparseness for PyTorch: every input opens only the weight blocks it needs."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from blockgate import errors
from blockgate._version import __version__ as __version__
from blockgate.checkpoint import load_pretrained, save_pretrained
from blockgate.convert import calibrate, pack, sparsify_
from blockgate.inspect import advise, allocate, explain, record_gates, sensitivity, summary
from blockgate.integrations.distil import distil
from blockgate.layers import (
    DynamicSparseGRU,
    DynamicSparseLinear,
    DynamicSparseLSTM,
    DynamicSparseMLP,
    DynamicSparseQRNN,
)
from blockgate.schedule import SparsityRamp, set_sparsity

__all__ = [
    "DynamicSparseGRU",
    "DynamicSparseLSTM",
    "DynamicSparseLinear",
    "DynamicSparseMLP",
    "DynamicSparseQRNN",
    "SparsityRamp",
    "advise",
    "allocate",
    "calibrate",
    "distil",
    "errors",
    "explain",
    "load_pretrained",
    "pack",
    "record_gates",
    "save_pretrained",
    "sensitivity",
    "set_sparsity",
    "sparsify_",
    "summary",
]

# Names that stood here in version 0.1, and the modules they live in now.
_MOVED = {
    "BlockGrid": "grid",
    "DropoutEmbedding": "layers",
    "DynamicSparseLSTMCell": "layers",
    "LockedDropout": "layers",
    "QRNN": "layers",
    "SparsifyReport": "convert",
    "gate_losses": "inspect",
    "open_blocks": "grid",
    "register_model": "checkpoint",
    "weight_drop_": "layers",
}


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module 'blockgate' has no attribute {name!r}")
    home = f"blockgate.{_MOVED[name]}"
    warnings.warn(f"blockgate.{name} has moved: use {home}.{name}.", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module(home), name)
