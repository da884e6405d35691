"""Looking at gates: what a model costs, what its gates decide, pictures of both, and losses that shape them."""

from blockgate.analysis.losses import GateLosses, gate_losses
from blockgate.analysis.pictures import draw_classes, draw_distribution, draw_trace
from blockgate.analysis.record import GateRecord, record_gates
from blockgate.analysis.summary import ModelSummary, summary

__all__ = [
    "GateLosses",
    "GateRecord",
    "ModelSummary",
    "draw_classes",
    "draw_distribution",
    "draw_trace",
    "gate_losses",
    "record_gates",
    "summary",
]
