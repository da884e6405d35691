"""`pack`: an inference copy of any model, whose linear layers and LSTMs hold packed blocks alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from blockgate.convert.forms import packers
from blockgate.convert.shortcuts import use_layers
from blockgate.errors import invalid
from blockgate.formats import Format, get_format
from blockgate.layers.dropout import is_hooked
from blockgate.runtime.recurrent import is_plain_lstm, matrix_names

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
            packed[module] = packers()[type(module)](module, stored_as)
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
    if type(module) not in packers() or is_hooked(module):
        return False
    if type(module) is nn.LSTM and not is_plain_lstm(module):
        return False
    layers = getattr(module, "num_layers", 0)
    weights = [f"weight_{name}" for name in matrix_names(layers)] if layers else ["weight"]
    return all(weight in module._parameters for weight in weights)
