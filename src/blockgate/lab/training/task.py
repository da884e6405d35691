"""What a run learns, as far as the loop knows it: batches, the loss of a batch, and how well a model does."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["ALONE", "Share", "Step", "Task", "epoch_generator", "sha256_of"]


class Share(NamedTuple):
    """Which of how many processes this is: it takes every `world`-th column or image from `rank` on."""

    rank: int = 0
    world: int = 1


ALONE = Share()


class Step(NamedTuple):
    """A batch that has been through the model.

    Args:
        loss: for the backward pass; the average over processes is that of the whole batch.
        sums: what `Task.metrics` takes, for this process's share.
        carried: the state for the next batch.
    """

    loss: Tensor
    sums: Tensor
    carried: Any


class Task(ABC):
    """One thing to learn.

    `score` names the metric that chooses the best model, lower is better; `unit` is what sums count.
    """

    score: str
    unit: str

    @abstractmethod
    def make_model(self) -> nn.Module:
        """A fresh model."""

    @abstractmethod
    def plan(self, epoch: int) -> list[Any]:
        """The batches of an epoch, in order; the same for the same epoch, whenever it is asked."""

    @abstractmethod
    def learn(self, model: nn.Module, batch: Any, carried: Any, device: torch.device) -> Step:
        """Loss of a batch in training."""

    def restore(self, model: nn.Module, carried: Any) -> Any:  # noqa: ARG002
        """What a checkpoint has as carried, in the form that `learn` takes."""
        return carried

    def lr_scale(self, batch: Any) -> float:  # noqa: ARG002
        """What this batch's learning rate is multiplied by."""
        return 1.0

    @abstractmethod
    def evaluate(self, model: nn.Module, part: str, device: torch.device, most: int | None = None) -> Tensor:
        """Sums over this process's share of "valid" or "test", or of its first `most` batches."""

    @abstractmethod
    def single_inputs(self, part: str, count: int) -> list[Tensor]:
        """The first inputs of a part, one by one, as a model at work would meet them."""

    @abstractmethod
    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Averages by name from sums; the last sum is the count of units."""

    @abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 of the data as numbers: two runs with the same one have seen the same."""

    @abstractmethod
    def model_facts(self) -> dict[str, Any]:
        """What a checkpoint needs, beside the config, to make the model again."""


def sha256_of(*tensors: Tensor) -> str:
    """SHA-256 of the numbers of some tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Random numbers of one epoch: a run that is resumed draws the same."""
    return torch.Generator().manual_seed(seed * 1_000_003 + epoch)
