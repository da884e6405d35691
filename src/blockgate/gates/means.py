"""Running means of what gates see in training, and how processes that train together share them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed, nn

from blockgate.errors import BlockgateError
from blockgate.gates.base import Gate

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["RunningMeans", "share_means"]

# How far a running mean moves towards the mean of a batch.
MOMENTUM = 0.02


class _Group:
    """A group of processes, which copies of a gate share and which pickles leave behind."""

    def __init__(self, processes: ProcessGroup | None = None) -> None:
        self.processes = processes

    def __deepcopy__(self, _: object) -> _Group:
        return self

    def __reduce__(self) -> tuple[type[_Group], tuple[()]]:
        return _Group, ()


class RunningMeans:
    """What a kind of gate that keeps running means inherits.

    Attributes:
        shared: whether a batch is that of several processes together; `share_means` says of which.
    """

    shared: bool = False
    _group = _Group()

    def move(self, mean: Tensor, rows: Tensor) -> None:
        """One step of a running mean (n) towards that of the rows (N, n); what is not finite would stay for good."""
        towards = rows.mean(0) if len(rows) else torch.zeros_like(mean)
        if distributed.is_available() and distributed.is_initialized():
            if self.shared:
                # In one message: the sums and how many rows they are of, which may be none in some process.
                message = torch.cat([towards, torch.ones_like(towards[:1])]).double() * len(rows)
                distributed.all_reduce(message, group=self._group.processes)
                towards = (message[:-1] / message[-1]).to(mean.dtype)
            # The mark of fully_shard. Nothing keeps buffers of sharded models alike, as DDP does.
            elif getattr(self, "_is_fsdp_managed_module", False) and distributed.get_world_size() > 1:
                raise BlockgateError(
                    "gates of a sharded model: expected running means that all processes share, got one for each. "
                    "Call blockgate.gates.share_means(model) in every process before training."
                )
        towards = towards.to(mean.dtype)
        mean.lerp_(torch.where(towards.isfinite(), towards, mean), MOMENTUM)


def share_means(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Lets the gates of a model count the rows of all processes, as one process with the whole batch would.

    For data-parallel training: call it once, before the first step and in every process. Each training pass then
    sends one short message for every gate. Without it each process counts its own rows: DistributedDataParallel then
    hands on the means of the first, and training a model under `fully_shard` is an error.

    Args:
        model: with gated layers.
        group: the processes that see different rows; all if unset. A model that is split in other ways too (tensor or
            pipeline parallel) needs the group that is data-parallel.
    """
    for gate in model.modules():
        if isinstance(gate, Gate) and isinstance(gate, RunningMeans):
            gate.shared = True
            gate._group = _Group(group)
