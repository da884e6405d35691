"""The gate's linear layer: key to scores."""

from blockgate.ops.gate_scores.op import centred_scores, gate_scores

__all__ = ["centred_scores", "gate_scores"]
