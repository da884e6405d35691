"""Modules with parameters: what a user puts into a model."""

from blockgate.layers.conv1d import DynamicSparseConv1D
from blockgate.layers.convert import sparsify_
from blockgate.layers.convert_report import LayerReport, SparsifyReport
from blockgate.layers.linear import DynamicSparseLinear
from blockgate.layers.pack import pack
from blockgate.layers.packed import PackedDynamicSparseLinear, PackedLinear
from blockgate.layers.qrnn import QRNN, DynamicSparseQRNN

__all__ = [
    "QRNN",
    "DynamicSparseConv1D",
    "DynamicSparseLinear",
    "DynamicSparseQRNN",
    "LayerReport",
    "PackedDynamicSparseLinear",
    "PackedLinear",
    "SparsifyReport",
    "pack",
    "sparsify_",
]
