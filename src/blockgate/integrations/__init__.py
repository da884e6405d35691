"""Other people's trainers and files. Each file needs its own package, and is imported by name."""

from __future__ import annotations

import importlib
import sys

from torch import nn

from blockgate.convert.sparsify import after_conversion

__all__: list[str] = []


def _keep_gates(model: nn.Module) -> None:
    """Lets a converted model of transformers, wherever it stands in `model`, save its gates with the rest."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    found = [] if base is None else [module for module in model.modules() if isinstance(module, base)]
    if found:
        keep = importlib.import_module("blockgate.integrations.quantizer").keep_gates
        for module in found:
            keep(module)


after_conversion.append(_keep_gates)
