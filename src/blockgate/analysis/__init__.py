"""Looking at gates: what a model costs, what its gates decide, pictures of both, and losses that shape them."""

from blockgate.analysis.losses import GateLosses, gate_losses
from blockgate.analysis.record import GateRecord, record_gates
from blockgate.analysis.summary import ModelSummary, summary

__all__ = ["GateLosses", "GateRecord", "ModelSummary", "gate_losses", "record_gates", "summary"]
