"""How a layer runs: which path and why, prepared and packed matrices, packed layers."""

from blockgate.runtime.linear import RunnableLinear
from blockgate.runtime.lstm import RunnableLSTM
from blockgate.runtime.packed import PackedDynamicSparseLinear, PackedLinear
from blockgate.runtime.packed_lstm import PackedLSTM
from blockgate.runtime.plan import Plan

__all__ = ["RUNNABLE", "PackedDynamicSparseLinear", "PackedLSTM", "PackedLinear", "Plan"]

# The layers with a `plan` for every call.
RUNNABLE = (RunnableLinear, RunnableLSTM, PackedLinear, PackedLSTM)
