"""Models spread over processes: how a run shards its model, and whole states for its checkpoints."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from blockgate.find import holds_shards, is_sharded

__all__ = ["load_model", "load_optimizer", "model_state", "optimizer_state", "reshard", "shard", "spread_like", "whole"]


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    """Spreads a model over the data-parallel processes of a mesh.

    As one group: output layers read weights of other layers, which must be whole at the same time.
    """
    from torch.distributed.fsdp import fully_shard

    # It warns of outputs that are views, which must not be changed in place: tasks don't.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def reshard(model: nn.Module) -> None:
    """Gives up the whole weights that a call in eval mode leaves behind, and that no optimizer would update."""
    if holds_shards(model):
        model.reshard()  # type: ignore[operator]


def model_state(model: nn.Module) -> dict[str, Any]:
    """The state of a model, whole; every process must call it, and the first gets all of it."""
    if not holds_shards(model):
        return model.state_dict()
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return get_model_state_dict(model, options=_whole())


def load_model(model: nn.Module, state: dict[str, Any]) -> None:
    """Takes over a whole state; every process must have it."""
    if not holds_shards(model):
        model.load_state_dict(state)
        return
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    set_model_state_dict(model, dict(state), options=_whole(cpu_offload=False))


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer, as `model_state`."""
    if not holds_shards(model):
        return optimizer.state_dict()
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return get_optimizer_state_dict(model, optimizer, options=_whole())


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Takes over a whole state, as `load_model`."""
    if not holds_shards(model):
        optimizer.load_state_dict(state)
        return
    if not any(isinstance(value, Tensor) for of_one in state["state"].values() for value in of_one.values()):
        # That of SGD without momentum, which torch can't load into shards.
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        return
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    set_optimizer_state_dict(model, optimizer, state, options=_whole(cpu_offload=False))


def whole(state: Any) -> Any:
    """A state of dicts and lists whose tensors are whole; every process must call it."""
    if isinstance(state, dict):
        return {name: whole(value) for name, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    return state.full_tensor() if is_sharded(state) else state


def spread_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor on the device of another of its shape, spread over processes as that one is."""
    tensor = tensor.to(other.device)
    if not is_sharded(other):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(other, DTensor)
    return distribute_tensor(tensor, other.device_mesh, other.placements)


def _whole(*, cpu_offload: bool = True) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
