"""Which dense layers have a gated form, and how layers of a model are replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from blockgate.convert.shortcuts import use_layers
from blockgate.layers.conv1d import DynamicSparseConv1D, huggingface_conv1d
from blockgate.layers.linear import DynamicSparseLinear
from blockgate.layers.lstm import DynamicSparseLSTM, DynamicSparseLSTMCell
from blockgate.layers.qrnn import QRNN, DynamicSparseQRNN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["gated_forms", "replace_layers"]


def gated_forms() -> dict[type[nn.Module], Any]:
    """The gated class of every type of layer that has one; each has a `from_dense(layer, **options)`."""
    forms: dict[type[nn.Module], Any] = {
        nn.Linear: DynamicSparseLinear,
        nn.LSTM: DynamicSparseLSTM,
        nn.LSTMCell: DynamicSparseLSTMCell,
        QRNN: DynamicSparseQRNN,
    }
    if conv1d := huggingface_conv1d():
        forms[conv1d] = DynamicSparseConv1D
    return forms


def replace_layers(model: nn.Module, made: Mapping[nn.Module, nn.Module]) -> Callable[[], None]:
    """Puts every `made[layer]` in the place of `layer`, wherever in `model` it occurs.

    Returns:
        A function that takes the change back.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and child in made
    ]
    for parent, name, child in places:
        parent._modules[name] = made[child]
    undo_shortcuts = use_layers(model)

    def undo() -> None:
        undo_shortcuts()
        for parent, name, child in places:
            parent._modules[name] = child

    return undo
