"""`pack`: an inference copy of any model, whose linear layers hold packed blocks alone."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import nn

from blockgate.errors import invalid
from blockgate.layers.dropout import is_hooked
from blockgate.layers.linear import DynamicSparseLinear
from blockgate.layers.packed import PackedDynamicSparseLinear, PackedLinear, check_packed_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["pack"]


def pack(
    model: nn.Module,
    dtype: torch.dtype = torch.float32,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> nn.Module:
    """A copy of `model` for inference: gated and plain linear layers become packed ones. `model` is left as it is.

    Args:
        model: any module, a single layer included.
        dtype: what weights are stored as: torch.float32, torch.bfloat16 or torch.int8. Products with int8
            weights are summed exactly, in integers, with inputs rounded to 16 bits; all others in float32.
        filter_fn: called with each linear layer and its name; layers it answers with False stay unpacked.

    Returns:
        The packed copy, in eval mode, without gradients. Layers that occur twice in the model are packed once; layers
        with forward hooks or parametrizations, and subclasses of nn.Linear, stay as they are.
    """
    check_packed_dtype(dtype)
    if not isinstance(model, nn.Module):
        raise invalid("pack", expected="an nn.Module", got=type(model).__name__, remedy="Pass a model or a layer.")
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise invalid(
            "pack", expected="a model whose parameters exist", got="lazy layers", remedy="Run a batch through it first."
        )
    packed: dict[nn.Module, nn.Module] = {}
    for name, module in model.named_modules():
        if _is_packable(module) and (filter_fn is None or filter_fn(module, name)):
            packed[module] = _pack_layer(module, dtype)
    if not packed:
        raise invalid(
            "pack",
            expected="a model with linear layers to pack",
            got=type(model).__name__,
            remedy="nn.Linear and the layers of blockgate can be packed.",
        )
    # deepcopy takes what its memo already knows, so the weights that were packed are never copied.
    memo = {id(layer): made for layer, made in packed.items()}
    made = copy.deepcopy(model, memo).eval().requires_grad_(False)
    for module in made.modules():
        _use_layers(module)
    return made


def _is_packable(module: nn.Module) -> bool:
    # Exact types: a subclass may compute something else, and a parametrized layer is one.
    return type(module) in {nn.Linear, DynamicSparseLinear} and "weight" in module._parameters and not is_hooked(module)


def _use_layers(module: nn.Module) -> None:
    """Turns off the shortcuts of torch's transformers that read `linear.weight` and go around the layer."""
    if isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = 0
    if isinstance(module, nn.TransformerEncoder):
        module.use_nested_tensor = False


def _pack_layer(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    if isinstance(layer, DynamicSparseLinear):
        return PackedDynamicSparseLinear(layer, dtype)
    return PackedLinear(layer, dtype)
