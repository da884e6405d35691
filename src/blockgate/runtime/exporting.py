"""Layers of our ops in an export to ONNX: one clear error, before the exporter's own."""

from __future__ import annotations

import torch

from blockgate.errors import BlockgateError

__all__ = ["EXPORTABLE", "NO_FORM", "PACKED", "refuse_onnx_export"]

# What to do about it, by the kind of layer.
EXPORTABLE = "Export blockgate.integrations.onnx.exportable(model) instead."
PACKED = (
    "Export blockgate.integrations.onnx.exportable(model) of the gated model that it was packed from, or the dense "
    "model itself."
)
NO_FORM = "This kind has no form of standard ops: run it with PyTorch, or export a dense model of nn.LSTM or nn.GRU."


def refuse_onnx_export(what: str, remedy: str) -> None:
    """Raises if `torch.onnx.export`, by either of its ways, reads this call: ONNX has no ops for what it does."""
    if (torch.compiler.is_compiling() or torch._C._is_tracing()) and _exporting():
        raise BlockgateError(f"torch.onnx.export: expected a model of standard ops, got {what}. {remedy}")


def _exporting() -> bool:
    return torch.onnx.is_in_onnx_export()


# The exporter tries torch.compile's front end too, which takes is_in_onnx_export for False unless it is told to call.
# This is what torch.compiler.assume_constant_result sets, after importing the compiler.
setattr(_exporting, "_dynamo_marked_constant", True)  # noqa: B010
