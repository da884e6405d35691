"""How a layer runs: which path and why, prepared and packed matrices, packed layers."""

from blockgate.runtime.packed import PackedDynamicSparseLinear, PackedLinear
from blockgate.runtime.packed_lstm import PackedLSTM

__all__ = ["PackedDynamicSparseLinear", "PackedLSTM", "PackedLinear"]
