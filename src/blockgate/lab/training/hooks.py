"""Things that act on a model while it trains: a rising sparsity, averaged weights, or what you write yourself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from blockgate.gates import BlockReviver
from blockgate.lab.baselines import MagnitudePruner, prunable_weights
from blockgate.lab.training.config import AnnealConfig, PruningConfig, RampConfig, Run
from blockgate.lab.training.gate_health import has_gates
from blockgate.lab.training.shards import spread_like
from blockgate.schedule import SparsityRamp, TemperatureRamp

__all__ = ["AnnealHook", "Hook", "PruningHook", "RampHook", "ReviveHook", "WeightAverage", "hooks_of"]


class Hook:
    """Base of all hooks: each method does nothing. State that must survive a restart belongs in `state_dict`."""

    def after_update(self) -> None:
        """Called after every optimizer step, while the gradients are still there."""

    def after_epoch(self, score: float) -> None:
        """Called after every epoch and its validation, with the score (lower is better)."""

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Wraps evaluation and the saving of the best model."""
        yield

    @property
    def settled(self) -> bool:
        """Whether the model is what it is to become; only then can it be the best one of a run."""
        return True

    @property
    def sparsity(self) -> float | None:
        """The sparsity it has set, for logs; when it moves, schedules forget the scores before."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on from here: tensors, numbers, text, lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint, whose model has been loaded."""


class _GradualHook(Hook):
    """A hook around something that changes the model step by step, until its end.

    Args:
        steps: a ramp or a pruner.
    """

    def __init__(self, steps: SparsityRamp | TemperatureRamp | MagnitudePruner) -> None:
        self.steps = steps

    @property
    def settled(self) -> bool:
        """Whether the end is reached."""
        return self.steps.steps_done >= self.steps.end

    @property
    def sparsity(self) -> float | None:
        """What is asked for now."""
        return None if isinstance(self.steps, TemperatureRamp) else self.steps.sparsity

    def state_dict(self) -> dict[str, Any]:
        """Of the ramp or pruner."""
        return self.steps.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of the ramp or pruner."""
        self.steps.load_state_dict(state)


class RampHook(_GradualHook):
    """Lets the sparsity of all gates rise from 0 to `final`.

    Args:
        model: with gated layers.
        final: sparsity at the end.
        config: when; in epochs.
        updates_per_epoch: how many updates an epoch has.
    """

    def __init__(self, model: nn.Module, final: float, config: RampConfig, updates_per_epoch: int) -> None:
        unit = 1 if config.every == "epoch" else updates_per_epoch
        self.every = config.every
        begin, end = round(config.begin * unit), round(config.end * unit)
        super().__init__(SparsityRamp(model, final, begin, end, config.shape))

    def after_update(self) -> None:
        """A step of a ramp that moves with updates."""
        if self.every == "update":
            self.steps.step()

    def after_epoch(self, score: float) -> None:  # noqa: ARG002
        """A step of a ramp that moves with epochs."""
        if self.every == "epoch":
            self.steps.step()


class AnnealHook(_GradualHook):
    """Lets the temperature of all gates that have one fall.

    Args:
        model: with gated layers.
        config: when and how far; in epochs.
        updates_per_epoch: how many updates an epoch has.
    """

    def __init__(self, model: nn.Module, config: AnnealConfig, updates_per_epoch: int) -> None:
        begin, end = round(config.begin * updates_per_epoch), round(config.end * updates_per_epoch)
        super().__init__(TemperatureRamp(model, begin, end, initial=config.initial, final=config.final))

    def after_update(self) -> None:
        """A step."""
        self.steps.step()


class ReviveHook(Hook):
    """Brings back blocks that no row opens, in steps that fall with the learning rate.

    Args:
        model: with gated layers.
        optimizer: of `make_optimizer`, whose last group holds the gates.
        rate: size of the steps, as a share of the gates' learning rate.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, rate: float) -> None:
        self.reviver, self.optimizer, self.rate = BlockReviver(model), optimizer, rate
        self.model = model

    def after_update(self) -> None:
        """One step."""
        self.reviver.step(self.rate * self.optimizer.param_groups[-1]["lr"])

    def state_dict(self) -> dict[str, Any]:
        """How long blocks have rested."""
        return self.reviver.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint."""
        parameters = dict(self.model.named_parameters())
        counts = {
            name: spread_like(count, parameters.get(f"{name}.bias", count))
            for name, count in state.get("unseen", {}).items()
        }
        self.reviver.load_state_dict(state | {"unseen": counts})


class PruningHook(_GradualHook):
    """Prunes the matrices whose kind the model's config decides: those of recurrent or of hidden layers.

    Args:
        model: with `matrix_layers`, and dense matrices in them.
        config: how much and when; in epochs.
        updates_per_epoch: how many updates an epoch has.
    """

    def __init__(self, model: nn.Module, config: PruningConfig, updates_per_epoch: int) -> None:
        layers = tuple(f"{name}." for name in model.matrix_layers)  # type: ignore[union-attr]
        begin, end, every = (
            max(1, round(epochs * updates_per_epoch)) for epochs in (config.begin, config.end, config.every)
        )
        weights = prunable_weights(model, lambda name: name.startswith(layers))
        options: dict[str, Any] = {"initial": config.initial, "block_size": config.block_size}
        super().__init__(MagnitudePruner(weights, config.sparsity, begin, end, every, **options))

    def after_update(self) -> None:
        """Prunes when it is time, and keeps what is pruned at zero."""
        self.steps.step()


class WeightAverage(Hook):
    """Averages the weights over all updates from some update on, or once validation improves no more (Merity, 2017).

    torch's AveragedModel would be a second model to evaluate and to save; here the averages take the place of the
    weights during evaluation, so that gates are counted and checkpoints written as ever.

    Args:
        model: whose parameters are averaged.
        patience: epochs without improvement after which averaging begins.
        begin: the number of updates after which it begins instead.
    """

    def __init__(self, model: nn.Module, patience: int, begin: int | None = None) -> None:
        self.parameters = dict(model.named_parameters())
        self.patience, self.begin = patience, begin
        self.updates = 0
        self.best = math.inf
        self.bad_epochs = 0
        self.count = 0
        self.means: dict[str, Tensor] = {}

    @property
    def started(self) -> bool:
        """Whether weights are being averaged."""
        return bool(self.means)

    @torch.no_grad()
    def after_update(self) -> None:
        """Takes the weights into the average."""
        self.updates += 1
        if self.updates == self.begin:
            self._start()
        elif self.started:
            self.count += 1
            for name, mean in self.means.items():
                mean.lerp_(self.parameters[name], 1 / self.count)

    def after_epoch(self, score: float) -> None:
        """Begins to average when it is time."""
        self.bad_epochs = 0 if score < self.best else self.bad_epochs + 1
        self.best = min(self.best, score)
        if self.begin is None and not self.started and self.bad_epochs > self.patience:
            self._start()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """The averages stand in for the weights."""
        if not self.started:
            yield
            return
        kept = self._copy()
        self._write(self.means)
        try:
            yield
        finally:
            self._write(kept)

    def _start(self) -> None:
        self.means, self.count = self._copy(), 1

    def _copy(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def _write(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self.parameters[name].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Averages and counters."""
        counts = {"updates": self.updates, "bad_epochs": self.bad_epochs, "count": self.count}
        return counts | {"best": self.best, "means": self.means}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint."""
        self.best, self.bad_epochs, self.count = state["best"], state["bad_epochs"], state["count"]
        self.updates = state.get("updates", 0)
        self.means = {name: spread_like(mean, self.parameters[name]) for name, mean in state["means"].items()}


def hooks_of(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, updates_per_epoch: int) -> list[Hook]:
    """The hooks that the config of a run asks for."""
    hooks: list[Hook] = []
    if run.ramp.end and has_gates(model):
        sparsity = run.model.gate.sparsity  # type: ignore[attr-defined]
        hooks.append(RampHook(model, sparsity, run.ramp, updates_per_epoch))
    if run.anneal.end and has_gates(model):
        hooks.append(AnnealHook(model, run.anneal, updates_per_epoch))
    if run.optimizer.revive:
        hooks.append(ReviveHook(model, optimizer, run.optimizer.revive))
    if run.pruning.sparsity:
        hooks.append(PruningHook(model, run.pruning, updates_per_epoch))
    if run.optimizer.average_from is not None:
        begin = max(1, round(run.optimizer.average_from * updates_per_epoch))
        hooks.append(WeightAverage(model, run.optimizer.average_after, begin))
    elif run.optimizer.kind == "asgd":
        hooks.append(WeightAverage(model, run.optimizer.average_after))
    return hooks
