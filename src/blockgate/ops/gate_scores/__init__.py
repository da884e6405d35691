"""The gate's linear layer: key to scores."""

from blockgate.ops.gate_scores.op import gate_scores

__all__ = ["gate_scores"]
