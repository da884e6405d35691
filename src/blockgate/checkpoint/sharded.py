"""Checkpoints of models that several processes share: whole tensors from shards, and one process that writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, distributed

from blockgate.errors import BlockgateError
from blockgate.find import is_sharded

__all__ = ["run_on_first", "whole"]


def is_first() -> bool:
    """Whether this is the first process of a run, or the only one."""
    return not distributed.is_available() or not distributed.is_initialized() or distributed.get_rank() == 0


def whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state with all shards put together, one after the other; on the CPU, and only in the first process.

    Every process must call it. Values that are one tensor stay one.
    """
    gathered: dict[int, Tensor] = {}
    for tensor in state.values():
        if is_sharded(tensor) and id(tensor) not in gathered:
            full: Any = tensor.detach().full_tensor()  # type: ignore[attr-defined]
            gathered[id(tensor)] = full.cpu() if is_first() else full.new_empty(0)
    return {key: gathered.get(id(tensor), tensor) for key, tensor in state.items()}


def run_on_first(work: Callable[[], None]) -> None:
    """Does something in the first process while all others wait; they raise if it fails. Every process must call it."""
    error: list[Any] = [None]
    if is_first():
        try:
            work()
        except Exception as raised:
            error = [str(raised)]
            raise
        finally:
            distributed.broadcast_object_list(error)
        return
    distributed.broadcast_object_list(error)
    if error[0] is not None:
        raise BlockgateError(f"the first process failed: {error[0]}")
