"""Modules with parameters: what a user puts into a model."""

from blockgate.layers.conv1d import DynamicSparseConv1D
from blockgate.layers.dropout import DropoutEmbedding, LockedDropout, weight_drop_
from blockgate.layers.linear import DynamicSparseLinear
from blockgate.layers.lstm import DynamicSparseLSTM, DynamicSparseLSTMCell
from blockgate.layers.qrnn import QRNN, DynamicSparseQRNN

__all__ = [
    "QRNN",
    "DropoutEmbedding",
    "DynamicSparseConv1D",
    "DynamicSparseLSTM",
    "DynamicSparseLSTMCell",
    "DynamicSparseLinear",
    "DynamicSparseQRNN",
    "LockedDropout",
    "weight_drop_",
]
