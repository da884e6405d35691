"""The one table of layers: for each type its gated form, and what packs it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from blockgate.formats import Format
from blockgate.layers.conv1d import DynamicSparseConv1D, huggingface_conv1d, stores_transposed
from blockgate.layers.gru import DynamicSparseGRU, DynamicSparseGRUCell
from blockgate.layers.linear import DynamicSparseLinear
from blockgate.layers.lstm import DynamicSparseLSTM, DynamicSparseLSTMCell
from blockgate.layers.mlp import DynamicSparseMLP
from blockgate.layers.qrnn import QRNN, DynamicSparseQRNN
from blockgate.layers.recurrent_stack import GatedLayers
from blockgate.runtime.packed import PackedDynamicSparseLinear, PackedLinear
from blockgate.runtime.packed_columns import PackedColumnLinear, has_columns
from blockgate.runtime.packed_paired import PackedPairedMLP
from blockgate.runtime.packed_recurrent import PackedGRU, PackedLSTM, PackedRecurrence
from blockgate.runtime.recurrent import matrix_names

__all__ = ["gated_classes", "gated_forms", "packers"]


def gated_forms() -> dict[type[nn.Module], Any]:
    """The gated class of every type of layer that has one; each has a `from_dense(layer, **options)`."""
    forms: dict[type[nn.Module], Any] = {
        nn.Linear: DynamicSparseLinear,
        nn.LSTM: DynamicSparseLSTM,
        nn.LSTMCell: DynamicSparseLSTMCell,
        nn.GRU: DynamicSparseGRU,
        nn.GRUCell: DynamicSparseGRUCell,
        QRNN: DynamicSparseQRNN,
    }
    # Hugging Face's layer is known once their library is imported; no model has it before.
    if conv1d := huggingface_conv1d():
        forms[conv1d] = DynamicSparseConv1D
    return forms


def gated_classes() -> tuple[type[nn.Module], ...]:
    """Every class of gated layers; a paired MLP has several dense layers, and so no form of its own."""
    return (*gated_forms().values(), DynamicSparseMLP)


def packers() -> dict[type[nn.Module], Callable[[Any, Format], nn.Module]]:
    """What makes the packed form of every type of layer that has one; the rest of a layer's packing follows from it."""
    found: dict[type[nn.Module], Callable[[Any, Format], nn.Module]] = {
        nn.Linear: _pack_dense,
        nn.LSTM: partial(_pack_dense_layers, PackedLSTM),
        nn.GRU: partial(_pack_dense_layers, PackedGRU),
        DynamicSparseLinear: _pack_gated,
        DynamicSparseConv1D: _pack_gated,
        DynamicSparseLSTM: partial(_pack_gated_layers, PackedLSTM),
        DynamicSparseGRU: partial(_pack_gated_layers, PackedGRU),
        DynamicSparseMLP: PackedPairedMLP,
    }
    if conv1d := huggingface_conv1d():
        found[conv1d] = _pack_dense
    return found


def _pack_dense(layer: nn.Linear, stored_as: Format) -> PackedLinear:
    return PackedLinear(layer.weight, layer.bias, stored_as, transposed=stores_transposed(layer))


def _pack_gated(layer: DynamicSparseLinear, stored_as: Format) -> PackedDynamicSparseLinear | PackedColumnLinear:
    transposed = stores_transposed(layer)
    packed = PackedColumnLinear if has_columns(layer.gate) else PackedDynamicSparseLinear
    return packed(layer.weight, layer.bias, layer.gate, stored_as, transposed=transposed)


def _pack_dense_layers(made: type[PackedRecurrence], layer: nn.RNNBase, stored_as: Format) -> PackedRecurrence:
    names = matrix_names(layer)
    parts = {name: (getattr(layer, f"weight_{name}"), getattr(layer, f"bias_{name}", None)) for name in names}
    packed = {name: PackedLinear(*part, stored_as) for name, part in parts.items()}
    return made(packed, layer.batch_first, layer.bidirectional)


def _pack_gated_layers(made: type[PackedRecurrence], layer: GatedLayers, stored_as: Format) -> PackedRecurrence:
    packed = {name: PackedDynamicSparseLinear(*matrix, stored_as) for name, matrix in layer.matrices().items()}
    return made(packed, layer.batch_first, layer.bidirectional)
