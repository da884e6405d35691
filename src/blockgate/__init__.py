"""Block-wise dynamic sparseness for PyTorch: every input opens only the weight blocks it needs."""

from blockgate import errors
from blockgate._version import __version__
from blockgate.checkpoint import load_pretrained, save_pretrained
from blockgate.convert import pack, sparsify_
from blockgate.inspect import record_gates, summary
from blockgate.layers import DynamicSparseLinear, DynamicSparseLSTM, DynamicSparseQRNN
from blockgate.schedule import SparsityRamp, set_sparsity

__all__ = [
    "DynamicSparseLSTM",
    "DynamicSparseLinear",
    "DynamicSparseQRNN",
    "SparsityRamp",
    "__version__",
    "errors",
    "load_pretrained",
    "pack",
    "record_gates",
    "save_pretrained",
    "set_sparsity",
    "sparsify_",
    "summary",
]
