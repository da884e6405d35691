"""Block-wise dynamic sparseness for PyTorch: every input opens only the weight blocks it needs."""

from blockgate import errors
from blockgate._version import __version__
from blockgate.analysis import gate_losses, record_gates, summary
from blockgate.grid import BlockGrid, open_blocks
from blockgate.layers import (
    QRNN,
    DropoutEmbedding,
    DynamicSparseLinear,
    DynamicSparseLSTM,
    DynamicSparseLSTMCell,
    DynamicSparseQRNN,
    LockedDropout,
    pack,
    weight_drop_,
)
from blockgate.schedule import SparsityRamp, set_sparsity

__all__ = [
    "QRNN",
    "BlockGrid",
    "DropoutEmbedding",
    "DynamicSparseLSTM",
    "DynamicSparseLSTMCell",
    "DynamicSparseLinear",
    "DynamicSparseQRNN",
    "LockedDropout",
    "SparsityRamp",
    "__version__",
    "errors",
    "gate_losses",
    "open_blocks",
    "pack",
    "record_gates",
    "set_sparsity",
    "summary",
    "weight_drop_",
]
