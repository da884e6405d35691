"""`pack`: an inference copy of any model, whose linear layers and LSTMs hold packed blocks alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from blockgate.convert.shortcuts import use_layers
from blockgate.errors import invalid
from blockgate.formats import Format, get_format
from blockgate.layers.conv1d import DynamicSparseConv1D, huggingface_conv1d, stores_transposed
from blockgate.layers.dropout import is_hooked
from blockgate.layers.linear import DynamicSparseLinear
from blockgate.layers.lstm import DynamicSparseLSTM
from blockgate.runtime.packed import PackedDynamicSparseLinear, PackedLinear
from blockgate.runtime.packed_lstm import PackedLSTM
from blockgate.runtime.recurrent import is_plain_lstm

__all__ = ["pack"]


def pack(
    model: nn.Module,
    dtype: str | torch.dtype | Format = torch.float32,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> nn.Module:
    """A copy of `model` for inference: linear layers and LSTMs, gated or not, become packed ones.

    Args:
        model: any module, a single layer included.
        dtype: the format that weights are stored in, by its name in `blockgate.formats` ("float32", "bfloat16", "int8",
            "int4"), or the torch dtype of that name. Products with integer weights are summed exactly, in integers,
            with inputs rounded to 16 bits; all others in float32.
        filter_fn: called with each layer to pack and its name; layers it answers with False stay unpacked.

    Returns:
        The packed copy, in eval mode, without gradients. Layers that occur twice in the model are packed once; layers
        with forward hooks or parametrizations, bidirectional LSTMs and subclasses of nn.Linear or nn.LSTM stay as they
        are. `model` itself is left alone.
    """
    stored_as = get_format(dtype)
    if not isinstance(model, nn.Module):
        raise invalid("pack", expected="an nn.Module", got=type(model).__name__, remedy="Pass a model or a layer.")
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise invalid(
            "pack", expected="a model whose parameters exist", got="lazy layers", remedy="Run a batch through it first."
        )
    packed: dict[nn.Module, nn.Module] = {}
    for name, module in model.named_modules():
        if _is_packable(module) and (filter_fn is None or filter_fn(module, name)):
            packed[module] = _packers()[type(module)](module, stored_as)
    if not packed:
        raise invalid(
            "pack",
            expected="a model with layers to pack",
            got=type(model).__name__,
            remedy="nn.Linear, nn.LSTM, Conv1D and the layers of blockgate can be packed.",
        )
    # deepcopy takes what its memo already knows, so the weights that were packed are never copied.
    memo = {id(layer): made for layer, made in packed.items()}
    made = copy.deepcopy(model, memo).eval().requires_grad_(False)
    use_layers(made)
    return made


def _is_packable(module: nn.Module) -> bool:
    # Exact types: a subclass may compute something else, and a parametrized layer is one. Pruned layers have lost
    # their weight from the parameters.
    if type(module) is nn.LSTM and not is_plain_lstm(module):
        return False
    weights = {"weight_ih_l0", "weight_hh_l0"} if type(module) in {nn.LSTM, DynamicSparseLSTM} else {"weight"}
    return type(module) in _packers() and weights <= module._parameters.keys() and not is_hooked(module)


def _packers() -> dict[Any, Callable[[Any, Format], nn.Module]]:
    """What makes the packed form of a type; Hugging Face's Conv1D is known once their library is imported."""
    return {
        nn.Linear: _dense,
        nn.LSTM: _dense_lstm,
        huggingface_conv1d(): _dense,
        DynamicSparseLinear: _gated,
        DynamicSparseConv1D: _gated,
        DynamicSparseLSTM: _gated_lstm,
    }


def _dense(layer: nn.Linear, stored_as: Format) -> PackedLinear:
    return PackedLinear(layer.weight, layer.bias, stored_as, transposed=stores_transposed(layer))


def _gated(layer: DynamicSparseLinear, stored_as: Format) -> PackedDynamicSparseLinear:
    transposed = stores_transposed(layer)
    return PackedDynamicSparseLinear(layer.weight, layer.bias, layer.gate, stored_as, transposed=transposed)


def _dense_lstm(lstm: nn.LSTM, stored_as: Format) -> PackedLSTM:
    names = [f"{part}_l{layer}" for layer in range(lstm.num_layers) for part in ("ih", "hh")]
    parts = {name: (getattr(lstm, f"weight_{name}"), getattr(lstm, f"bias_{name}", None)) for name in names}
    return PackedLSTM({name: PackedLinear(*part, stored_as) for name, part in parts.items()}, lstm.batch_first)


def _gated_lstm(lstm: DynamicSparseLSTM, stored_as: Format) -> PackedLSTM:
    packed = {name: PackedDynamicSparseLinear(*matrix, stored_as) for name, matrix in lstm.matrices().items()}
    return PackedLSTM(packed, lstm.batch_first)
