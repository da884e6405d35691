"""The computation: gate scores, selection, the gated block product. Registered with torch, judged by `reference`."""

from blockgate.ops import native as native  # loads the compiled kernels
from blockgate.ops.backend import BACKENDS, check_backend, check_device, describe_auto
from blockgate.ops.gate_scores import gate_scores
from blockgate.ops.gated_linear import gated_linear
from blockgate.ops.topk_gates import NORMALISE, topk_gates

__all__ = [
    "BACKENDS",
    "NORMALISE",
    "check_backend",
    "check_device",
    "describe_auto",
    "gate_scores",
    "gated_linear",
    "topk_gates",
]
