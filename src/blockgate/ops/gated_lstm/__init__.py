"""The recurrence of a gated LSTM over a whole sequence, for training."""

from blockgate.ops.gated_lstm.op import gated_lstm

__all__ = ["gated_lstm"]
