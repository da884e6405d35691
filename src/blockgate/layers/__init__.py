"""Modules with parameters: what a user puts into a model."""

from blockgate.layers.conv1d import DynamicSparseConv1D
from blockgate.layers.convert import sparsify_
from blockgate.layers.convert_report import LayerReport, SparsifyReport
from blockgate.layers.dropout import DropoutEmbedding, LockedDropout, weight_drop_
from blockgate.layers.linear import DynamicSparseLinear
from blockgate.layers.lstm import DynamicSparseLSTM, DynamicSparseLSTMCell
from blockgate.layers.pack import pack
from blockgate.layers.packed import PackedDynamicSparseLinear, PackedLinear
from blockgate.layers.packed_lstm import PackedLSTM
from blockgate.layers.qrnn import QRNN, DynamicSparseQRNN

__all__ = [
    "QRNN",
    "DropoutEmbedding",
    "DynamicSparseConv1D",
    "DynamicSparseLSTM",
    "DynamicSparseLSTMCell",
    "DynamicSparseLinear",
    "DynamicSparseQRNN",
    "LayerReport",
    "LockedDropout",
    "PackedDynamicSparseLinear",
    "PackedLSTM",
    "PackedLinear",
    "SparsifyReport",
    "pack",
    "sparsify_",
    "weight_drop_",
]
