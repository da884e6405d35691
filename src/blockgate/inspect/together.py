"""Facts about gates over all processes of a run, each of which sees a share of the rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from blockgate.errors import invalid

__all__ = ["Average", "from_all", "require_processes"]


class Average:
    """Averages over the rows of all processes, with gradients for runs that average gradients over processes."""

    def __init__(self) -> None:
        require_processes("gate_losses(shared=True)")

    def __call__(self, mean: Tensor, rows: int) -> Tensor:
        """The mean over all rows, from those of each process over its `rows`.

        Each process gets the gradient of its own part only, times the number of processes: averaging makes it whole.
        """
        part = mean * rows if rows else torch.zeros_like(mean)
        counted = self.total(torch.cat([part.detach().flatten(), part.new_tensor([rows])]).double())
        whole = (counted[:-1] / counted[-1]).view_as(mean).to(mean.dtype)
        own = part * (distributed.get_world_size() / float(counted[-1]))
        return own + (whole - own).detach()

    def total(self, counts: Tensor) -> Tensor:
        """The sum over processes."""
        summed = counts.clone()
        distributed.all_reduce(summed)
        return summed


def require_processes(what: str) -> None:
    """Raises unless torch.distributed has been started."""
    if not (distributed.is_available() and distributed.is_initialized()):
        raise invalid(
            what,
            expected="processes that torch.distributed connects",
            got="none",
            remedy="Start them with torchrun and call torch.distributed.init_process_group first.",
        )


def from_all(value: Any) -> list[Any]:
    """What every process passes, in the order of their ranks."""
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, value)
    return every
