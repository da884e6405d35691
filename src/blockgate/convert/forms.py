"""The one table of layers: for each type its gated form, and what packs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from blockgate.formats import Format
from blockgate.layers.conv1d import DynamicSparseConv1D, huggingface_conv1d, stores_transposed
from blockgate.layers.linear import DynamicSparseLinear
from blockgate.layers.lstm import DynamicSparseLSTM, DynamicSparseLSTMCell
from blockgate.layers.qrnn import QRNN, DynamicSparseQRNN
from blockgate.runtime.packed import PackedDynamicSparseLinear, PackedLinear
from blockgate.runtime.packed_lstm import PackedLSTM
from blockgate.runtime.recurrent import matrix_names

__all__ = ["gated_forms", "packers"]


def gated_forms() -> dict[type[nn.Module], Any]:
    """The gated class of every type of layer that has one; each has a `from_dense(layer, **options)`."""
    forms: dict[type[nn.Module], Any] = {
        nn.Linear: DynamicSparseLinear,
        nn.LSTM: DynamicSparseLSTM,
        nn.LSTMCell: DynamicSparseLSTMCell,
        QRNN: DynamicSparseQRNN,
    }
    # Hugging Face's layer is known once their library is imported; no model has it before.
    if conv1d := huggingface_conv1d():
        forms[conv1d] = DynamicSparseConv1D
    return forms


def packers() -> dict[type[nn.Module], Callable[[Any, Format], nn.Module]]:
    """What makes the packed form of every type of layer that has one; the rest of a layer's packing follows from it."""
    found: dict[type[nn.Module], Callable[[Any, Format], nn.Module]] = {
        nn.Linear: _pack_dense,
        nn.LSTM: _pack_dense_lstm,
        DynamicSparseLinear: _pack_gated,
        DynamicSparseConv1D: _pack_gated,
        DynamicSparseLSTM: _pack_gated_lstm,
    }
    if conv1d := huggingface_conv1d():
        found[conv1d] = _pack_dense
    return found


def _pack_dense(layer: nn.Linear, stored_as: Format) -> PackedLinear:
    return PackedLinear(layer.weight, layer.bias, stored_as, transposed=stores_transposed(layer))


def _pack_gated(layer: DynamicSparseLinear, stored_as: Format) -> PackedDynamicSparseLinear:
    transposed = stores_transposed(layer)
    return PackedDynamicSparseLinear(layer.weight, layer.bias, layer.gate, stored_as, transposed=transposed)


def _pack_dense_lstm(lstm: nn.LSTM, stored_as: Format) -> PackedLSTM:
    names = matrix_names(lstm.num_layers)
    parts = {name: (getattr(lstm, f"weight_{name}"), getattr(lstm, f"bias_{name}", None)) for name in names}
    return PackedLSTM({name: PackedLinear(*part, stored_as) for name, part in parts.items()}, lstm.batch_first)


def _pack_gated_lstm(lstm: DynamicSparseLSTM, stored_as: Format) -> PackedLSTM:
    packed = {name: PackedDynamicSparseLinear(*matrix, stored_as) for name, matrix in lstm.matrices().items()}
    return PackedLSTM(packed, lstm.batch_first)
