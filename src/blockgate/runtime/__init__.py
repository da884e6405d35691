"""How a layer runs: which path and why, prepared and packed matrices, packed layers."""

from blockgate.runtime.gated_recurrent import RunnableRecurrence
from blockgate.runtime.linear import RunnableLinear
from blockgate.runtime.packed import PackedDynamicSparseLinear, PackedLinear
from blockgate.runtime.packed_columns import PackedColumnLinear
from blockgate.runtime.packed_paired import PackedPairedMLP
from blockgate.runtime.packed_recurrent import PackedGRU, PackedLSTM, PackedRecurrence
from blockgate.runtime.paired import RunnableMLP
from blockgate.runtime.plan import Plan

__all__ = [
    "RUNNABLE",
    "PackedColumnLinear",
    "PackedDynamicSparseLinear",
    "PackedGRU",
    "PackedLSTM",
    "PackedLinear",
    "PackedPairedMLP",
    "Plan",
]

# The layers with a `plan` for every call.
RUNNABLE = (
    RunnableLinear,
    RunnableMLP,
    RunnableRecurrence,
    PackedLinear,
    PackedColumnLinear,
    PackedPairedMLP,
    PackedRecurrence,
)
