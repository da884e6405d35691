"""The recurrence of the Quasi-RNN."""

from blockgate.ops.forget_pool.op import forget_pool

__all__ = ["forget_pool"]
