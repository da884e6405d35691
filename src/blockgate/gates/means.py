"""Running means of what gates see in training, and how processes that train together share them."""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn

from blockgate.gates.base import Gate

__all__ = ["RunningMeans", "share_means"]

# How far a running mean moves towards the mean of a batch.
MOMENTUM = 0.02


class RunningMeans:
    """What a kind of gate that keeps running means inherits.

    Attributes:
        shared: whether a batch is that of all processes together.
    """

    shared: bool = False

    def move(self, mean: Tensor, rows: Tensor) -> None:
        """One step of a running mean (n) towards that of the rows (N, n); what is not finite would stay for good."""
        towards = rows.mean(0) if len(rows) else torch.zeros_like(mean)
        if self.shared and distributed.is_initialized():
            # In one message: the sums and how many rows they are of, which may be none in some process.
            message = torch.cat([towards, torch.ones_like(towards[:1])]).double() * len(rows)
            distributed.all_reduce(message)
            towards = (message[:-1] / message[-1]).to(mean.dtype)
        mean.lerp_(torch.where(towards.isfinite(), towards, mean), MOMENTUM)


def share_means(model: nn.Module) -> None:
    """Lets the gates of a model count the rows of all processes, as one process with the whole batch would.

    For data-parallel training: call it once, before the first step and in every process. Each training pass then
    sends one short message for every gate. Without it each process counts its own rows, and DistributedDataParallel
    hands on the means of the first.
    """
    for gate in model.modules():
        if isinstance(gate, Gate) and isinstance(gate, RunningMeans):
            gate.shared = True
