"""Modules with parameters: what a user puts into a model."""

from blockgate.layers.linear import DynamicSparseLinear
from blockgate.layers.pack import pack
from blockgate.layers.packed import PackedDynamicSparseLinear, PackedLinear
from blockgate.layers.qrnn import QRNN, DynamicSparseQRNN

__all__ = [
    "QRNN",
    "DynamicSparseLinear",
    "DynamicSparseQRNN",
    "PackedDynamicSparseLinear",
    "PackedLinear",
    "pack",
]
