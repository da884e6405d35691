"""The recurrence of a gated GRU over a whole sequence, for training."""

from blockgate.ops.gated_gru.op import gated_gru

__all__ = ["gated_gru"]
