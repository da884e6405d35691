"""Looking at gates: what a model costs, what its gates decide, pictures of both, and losses that shape them."""

from blockgate.inspect.advice import Advice, advise
from blockgate.inspect.allocation import Allocation, allocate
from blockgate.inspect.explain import Explanation, explain
from blockgate.inspect.losses import GateLosses, gate_losses
from blockgate.inspect.pictures import draw_classes, draw_distribution, draw_sensitivity, draw_trace
from blockgate.inspect.record import GateRecord, record_gates
from blockgate.inspect.sensitivity import LayerSensitivity, Sensitivity, sensitivity
from blockgate.inspect.summary import ModelSummary, summary

__all__ = [
    "Advice",
    "Allocation",
    "Explanation",
    "GateLosses",
    "GateRecord",
    "LayerSensitivity",
    "ModelSummary",
    "Sensitivity",
    "advise",
    "allocate",
    "draw_classes",
    "draw_distribution",
    "draw_sensitivity",
    "draw_trace",
    "explain",
    "gate_losses",
    "record_gates",
    "sensitivity",
    "summary",
]
