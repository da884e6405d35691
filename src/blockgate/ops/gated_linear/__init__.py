"""The gated block product, for training."""

from blockgate.ops.gated_linear.op import gated_linear

__all__ = ["gated_linear"]
