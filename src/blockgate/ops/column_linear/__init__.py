"""Products with the columns of a weight that the largest inputs open; for inference."""

from blockgate.ops.column_linear.op import column_linear

__all__ = ["column_linear"]
