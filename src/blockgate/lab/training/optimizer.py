"""Optimizers with a learning rate of their own for gates, and the factor that all learning rates are multiplied by."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from blockgate.errors import invalid
from blockgate.gates import Gate
from blockgate.lab.training.config import OptimizerConfig, ScheduleConfig

__all__ = ["LearningRate", "make_optimizer"]


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of a config; `base_lr` of each group is its learning rate before any schedule."""
    if not 0 < config.lr < math.inf or (config.gate_lr is not None and not 0 <= config.gate_lr < math.inf):
        raise invalid(
            "learning rate", expected="a positive number", got=(config.lr, config.gate_lr), remedy="Try another."
        )
    gates = {id(p) for module in model.modules() if isinstance(module, Gate) for p in module.parameters()}
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in gates], "lr": config.lr},
        {
            "params": [p for p in model.parameters() if id(p) in gates],
            "lr": config.lr if config.gate_lr is None else config.gate_lr,
        },
    ]
    groups = [group | {"base_lr": group["lr"]} for group in groups if group["params"]]
    if config.kind == "adam":
        return torch.optim.Adam(groups, weight_decay=config.weight_decay)
    return torch.optim.SGD(groups, momentum=config.momentum, weight_decay=config.weight_decay)


class LearningRate:
    """The factor by which a schedule multiplies all learning rates.

    torch's schedulers count whole steps and keep the rates that they have set; here the factor follows from the time in
    epochs, so that every segment of text can have a rate of its own, and a resumed run computes the same.

    Args:
        config: of the schedule.
        epochs: of the whole run.
    """

    def __init__(self, config: ScheduleConfig, epochs: int) -> None:
        if not 0 < config.factor <= 1 or config.every <= 0:
            raise invalid(
                "schedule",
                expected="a factor in (0, 1] and every > 0",
                got=(config.factor, config.every),
                remedy="The paper halves: factor 0.5.",
            )
        self.config = config
        self.epochs = epochs
        self.best = math.inf
        self.bad_epochs = 0
        self.falls = 0

    def factor(self, time: float) -> float:
        """The factor after `time` epochs, which need not be whole."""
        config = self.config
        rising = min(1.0, time / config.warmup) if config.warmup else 1.0
        if config.kind == "plateau":
            return rising * config.factor**self.falls
        if config.kind == "step":
            return rising * config.factor ** max(0, math.floor((time - config.begin) / config.every) + 1)
        if config.kind == "cosine":
            return rising * 0.5 * (1 + math.cos(math.pi * min(1.0, time / self.epochs)))
        return rising

    def after_epoch(self, score: float, *, changed: bool) -> None:
        """Counts epochs without improvement. A model that was changed from outside is compared from here on."""
        if changed or score < self.best:
            self.best, self.bad_epochs = score, 0
            return
        self.bad_epochs += 1
        if self.bad_epochs > self.config.patience:
            self.falls, self.bad_epochs = self.falls + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on from here."""
        return {"best": self.best, "bad_epochs": self.bad_epochs, "falls": self.falls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint."""
        self.best, self.bad_epochs, self.falls = state["best"], state["bad_epochs"], state["falls"]
