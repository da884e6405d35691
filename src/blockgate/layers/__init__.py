"""Modules with parameters: what a user puts into a model."""

from blockgate.layers.dropout import DropoutEmbedding, LockedDropout, weight_drop_
from blockgate.layers.linear import DynamicSparseLinear
from blockgate.layers.pack import pack
from blockgate.layers.packed import PackedDynamicSparseLinear, PackedLinear
from blockgate.layers.qrnn import QRNN, DynamicSparseQRNN

__all__ = [
    "QRNN",
    "DropoutEmbedding",
    "DynamicSparseLinear",
    "DynamicSparseQRNN",
    "LockedDropout",
    "PackedDynamicSparseLinear",
    "PackedLinear",
    "pack",
    "weight_drop_",
]
