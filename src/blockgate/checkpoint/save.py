"""`save_pretrained`: a model, or only its gates, as two files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockgate.checkpoint.files import fingerprint, write_checkpoint
from blockgate.checkpoint.layers import describe_layers, gate_prefixes
from blockgate.checkpoint.registry import check_registered
from blockgate.checkpoint.sharded import run_on_first, whole
from blockgate.errors import invalid
from blockgate.find import is_sharded, unwrapped
from blockgate.runtime.packed import PackedLinear
from blockgate.runtime.packed_columns import PackedColumnLinear

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

__all__ = ["save_pretrained"]


def save_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    gates_only: bool = False,
    constructor: str | None = None,
    constructor_options: Mapping[str, Any] | None = None,
) -> None:
    """Writes model.safetensors and config.json, from which `load_pretrained` rebuilds the gated layers.

    Types and tied weights are kept. An older checkpoint in the folder is replaced; on an error it stays as it was.
    A model that is sharded (`fully_shard`) is put together in the first process, which writes it: call this in every
    process. Of a model under DistributedDataParallel any process has it all: call it in one.

    Args:
        model: any model with gated layers, not packed: pack it after loading.
        directory: where to; made if it isn't there.
        gates_only: leave out all weights but those of the gates. The file is small, and belongs to the dense model
            with these very weights, which `load_pretrained` checks.
        constructor: the name of a model that `register_model` knows, to load without building it by hand.
        constructor_options: its keyword arguments.
    """
    model = unwrapped(model)
    _check_model(model)
    if constructor is not None:
        check_registered(constructor)
    layers = describe_layers(model)
    state = _tensors_of(model)
    if gates_only and not layers:
        raise invalid("gates_only", expected="a model with gated layers", got="none", remedy="Call sparsify_ first.")
    options = _as_json(constructor_options or {})
    sharded = any(map(is_sharded, state.values()))
    state = whole(state) if sharded else state
    gates = {key for key in state if key.startswith(gate_prefixes(model))}

    def write() -> None:
        dense = {key: tensor for key, tensor in state.items() if key not in gates}
        chosen = {key: tensor for key, tensor in state.items() if key in gates} if gates_only else state
        ties = _ties_of(chosen)
        config = {
            "gates_only": gates_only,
            "constructor": constructor,
            "constructor_options": options,
            "layers": layers,
            "ties": ties,
            "dense_sha256": fingerprint(dense) if gates_only else None,
        }
        write_checkpoint(directory, config, {key: _own_memory(t) for key, t in chosen.items() if key not in ties})

    if sharded:
        run_on_first(write)
    else:
        write()


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise invalid("save_pretrained", expected="an nn.Module", got=type(model).__name__, remedy="Pass a model.")
    if any(isinstance(module, (PackedLinear, PackedColumnLinear)) for module in model.modules()):
        raise invalid(
            "save_pretrained",
            expected="a model that is not packed",
            got="packed layers",
            remedy="Save the model that it was packed from, and call bg.pack after loading.",
        )


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, with Parameter objects as they are, so that ties show."""
    state = model.state_dict(keep_vars=True)
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.is_meta or value.layout is not torch.strided:
            what = type(value).__name__ if not isinstance(value, Tensor) else f"{value.layout} on {value.device}"
            raise invalid(
                f"state_dict()[{key!r}]", expected="a dense tensor with values", got=what, remedy="It can't be saved."
            )
    return dict(state)


def _ties_of(state: Mapping[str, Tensor]) -> dict[str, str]:
    """For every key whose tensor an earlier key has too: that key."""
    first: dict[Any, str] = {}
    ties = {}
    for key, tensor in state.items():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        known = first.setdefault(place if tensor.numel() else id(tensor), key)
        if known != key:
            ties[key] = known
    return ties


def _own_memory(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU, or the tensor itself if it has all of its memory to itself."""
    tensor = tensor.detach().cpu().contiguous()
    alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if alone else tensor.clone()


def _as_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options after a journey through JSON; an error if they don't come back the same."""
    try:
        arrived: dict[str, Any] = json.loads(json.dumps(dict(options)))
    except (TypeError, ValueError) as error:
        arrived = {"error": str(error)}
    if arrived != dict(options):
        raise invalid(
            "constructor_options",
            expected="keyword arguments that JSON can hold",
            got=options,
            remedy="Use numbers, strings, lists and dicts.",
        )
    return arrived
