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
    SparsifyReport,
    pack,
    sparsify_,
    weight_drop_,
)
from blockgate.schedule import SparsityRamp, set_sparsity
from blockgate.sharing import load_pretrained, register_model, save_pretrained

__all__ = [
    "QRNN",
    "BlockGrid",
    "DropoutEmbedding",
    "DynamicSparseLSTM",
    "DynamicSparseLSTMCell",
    "DynamicSparseLinear",
    "DynamicSparseQRNN",
    "LockedDropout",
    "SparsifyReport",
    "SparsityRamp",
    "__version__",
    "errors",
    "gate_losses",
    "load_pretrained",
    "open_blocks",
    "pack",
    "record_gates",
    "register_model",
    "save_pretrained",
    "set_sparsity",
    "sparsify_",
    "summary",
    "weight_drop_",
]
