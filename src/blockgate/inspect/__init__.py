"""Looking at gates: what a model costs, what its gates decide, pictures of both, and losses that shape them."""

from blockgate.inspect.explain import Explanation, explain
from blockgate.inspect.losses import GateLosses, gate_losses
from blockgate.inspect.pictures import draw_classes, draw_distribution, draw_trace
from blockgate.inspect.record import GateRecord, record_gates
from blockgate.inspect.summary import ModelSummary, summary

__all__ = [
    "Explanation",
    "GateLosses",
    "GateRecord",
    "ModelSummary",
    "draw_classes",
    "draw_distribution",
    "draw_trace",
    "explain",
    "gate_losses",
    "record_gates",
    "summary",
]
