"""`pack`: an inference copy of any model, whose linear and recurrent layers hold only packed blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import nn

from blockgate.convert.forms import packers
from blockgate.convert.shortcuts import use_layers
from blockgate.errors import invalid
from blockgate.find import holds_shards, matches
from blockgate.formats import Format, get_format
from blockgate.layers.dropout import is_hooked
from blockgate.runtime.packed_paired import PackedPairedMLP
from blockgate.runtime.paired import RunnableMLP
from blockgate.runtime.recurrent import has_projection, matrix_names
from blockgate.runtime.screened import ScreenedLinear

__all__ = ["pack"]


def pack(
    model: nn.Module,
    dtype: str | torch.dtype | Format = torch.float32,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    screened: str | Sequence[str] = (),
) -> nn.Module:
    """A copy of `model` for inference: linear layers, LSTMs and GRUs, gated or not, become packed ones.

    Args:
        model: any module, a single layer included.
        dtype: the format that weights are stored in, by its name in `blockgate.formats` ("float32", "bfloat16",
            "float16", "int8", "int4"), or the torch dtype of that name. Products with integer weights are summed
            exactly, in integers, with inputs rounded to 16 bits; all others in float32.
        filter_fn: called with each layer to pack and its name; layers it answers with False stay unpacked.
        screened: name patterns of output layers (nn.Linear) that become `ScreenedLinear`: they keep their float32
            weight, and `topk` and `rank` find the largest outputs exactly from about half a byte a weight. A weight
            that such a layer shares, as with an embedding, stays shared.

    Returns:
        The packed copy, in eval mode, without gradients. Layers that occur twice in the model are packed once; layers
        with forward hooks or parametrizations, LSTMs with a projection and subclasses of torch's layers stay as they
        are. `model` itself is left alone.
    """
    stored_as = get_format(dtype)
    if not isinstance(model, nn.Module):
        raise invalid("pack", expected="an nn.Module", got=type(model).__name__, remedy="Pass a model or a layer.")
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise invalid(
            "pack", expected="a model whose parameters exist", got="lazy layers", remedy="Run a batch through it first."
        )
    if holds_shards(model):
        raise invalid(
            "pack",
            expected="a model whose tensors are whole",
            got="one that fully_shard has spread over processes",
            remedy="Call bg.save_pretrained in every process, then bg.load_pretrained in one, and pack that.",
        )
    packed: dict[nn.Module, nn.Module] = dict(
        _screened_layers(model, [screened] if isinstance(screened, str) else screened)
    )
    for name, module in model.named_modules():
        if module not in packed and _is_packable(module) and (filter_fn is None or filter_fn(module, name)):
            made = packers()[type(module)](module, stored_as)
            packed[module] = made
            if isinstance(made, PackedPairedMLP):
                # Its matrices have places of their own in the model.
                packed.update({getattr(module, name): part for name, part in made.named_parts().items()})
    if not packed:
        raise invalid(
            "pack",
            expected="a model with layers to pack",
            got=type(model).__name__,
            remedy="nn.Linear, nn.LSTM, nn.GRU, Conv1D and the layers of blockgate can be packed.",
        )
    # deepcopy takes what its memo already knows, so the weights that were packed are never copied.
    memo: dict[int, object] = {id(layer): made for layer, made in packed.items()}
    for layer, made in packed.items():
        if isinstance(made, ScreenedLinear) and layer.weight.dtype == made.weight.dtype:
            memo[id(layer.weight)] = made.weight
    result = copy.deepcopy(model, memo).eval().requires_grad_(False)
    use_layers(result)
    return result


def _screened_layers(model: nn.Module, patterns: Sequence[str]) -> Iterator[tuple[nn.Module, ScreenedLinear]]:
    """The layers that any of these patterns names, and what they become."""
    named = dict(model.named_modules())
    for pattern in patterns:
        found = [name for name in named if matches(pattern, name)]
        if not found or not all(type(named[name]) is nn.Linear and _is_packable(named[name]) for name in found):
            raise invalid(
                "screened",
                expected="patterns that name plain nn.Linear layers, without hooks",
                got=f"{pattern}, which names {', '.join(found) or 'nothing'}",
                remedy="Name the output layer, such as 'lm_head'.",
            )
        for name in found:
            layer = cast("nn.Linear", named[name])
            yield layer, ScreenedLinear(layer.weight, layer.bias)


def _is_packable(module: nn.Module) -> bool:
    # Exact types: a subclass may compute something else, and a parametrized layer is one. Pruned layers have lost
    # their weight from the parameters.
    if type(module) not in packers() or is_hooked(module):
        return False
    if has_projection(module):
        return False
    if isinstance(module, RunnableMLP):
        return not any(is_hooked(part) or "weight" not in part._parameters for part in module.parts())
    recurrent = hasattr(module, "num_layers")
    weights = [f"weight_{name}" for name in matrix_names(module)] if recurrent else ["weight"]
    return all(weight in module._parameters for weight in weights)
