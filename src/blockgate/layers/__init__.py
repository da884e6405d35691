"""Modules with parameters: what a user puts into a model."""

from blockgate.layers.conv1d import DynamicSparseConv1D
from blockgate.layers.dropout import DropoutEmbedding, LockedDropout, weight_drop_
from blockgate.layers.gru import DynamicSparseGRU, DynamicSparseGRUCell
from blockgate.layers.linear import DynamicSparseLinear
from blockgate.layers.lstm import DynamicSparseLSTM, DynamicSparseLSTMCell
from blockgate.layers.mlp import DynamicSparseMLP
from blockgate.layers.qrnn import QRNN, DynamicSparseQRNN
from blockgate.layers.softmax import AdaptiveSoftmax

__all__ = [
    "QRNN",
    "AdaptiveSoftmax",
    "DropoutEmbedding",
    "DynamicSparseConv1D",
    "DynamicSparseGRU",
    "DynamicSparseGRUCell",
    "DynamicSparseLSTM",
    "DynamicSparseLSTMCell",
    "DynamicSparseLinear",
    "DynamicSparseMLP",
    "DynamicSparseQRNN",
    "LockedDropout",
    "weight_drop_",
]
