"""Checkpoints of former versions, whose language models had one module for each recurrent layer, to resume from."""

from __future__ import annotations

from typing import Any

from torch import nn

from blockgate.lab.models import LanguageModel
from blockgate.lab.training.hooks import Hook, PruningHook, WeightAverage

__all__ = ["hook_state"]


def hook_state(hook: Hook, saved: dict[str, Any], model: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint has saved of a hook, in the form that `hook` loads.

    Args:
        hook: that is to load it.
        saved: its state.
        model: that is trained.
        weights: the state dict of the model in the same checkpoint.
    """
    own_names = model.own_names if isinstance(model, LanguageModel) else dict
    if isinstance(hook, PruningHook):
        return saved | {"pruned": own_names(saved["pruned"])}
    if isinstance(hook, WeightAverage) and isinstance(saved["means"], list):
        # Averages were a list in the order of the parameters, which is that of the state dict.
        parameters = dict(model.named_parameters())
        names = [name for name in own_names(weights) if name in parameters]
        return saved | {"means": dict(zip(names, saved["means"], strict=False))}
    return saved
