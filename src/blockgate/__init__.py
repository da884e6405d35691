"""Block-wise dynamic sparseness for PyTorch: every input opens only the weight blocks it needs."""

from blockgate import errors
from blockgate._version import __version__
from blockgate.grid import BlockGrid, open_blocks
from blockgate.layers import QRNN, DynamicSparseLinear, DynamicSparseQRNN, SparsifyReport, pack, sparsify_
from blockgate.schedule import SparsityRamp, set_sparsity
from blockgate.sharing import load_pretrained, register_model, save_pretrained

__all__ = [
    "QRNN",
    "BlockGrid",
    "DynamicSparseLinear",
    "DynamicSparseQRNN",
    "SparsifyReport",
    "SparsityRamp",
    "__version__",
    "errors",
    "load_pretrained",
    "open_blocks",
    "pack",
    "register_model",
    "save_pretrained",
    "set_sparsity",
    "sparsify_",
]
