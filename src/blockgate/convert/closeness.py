"""How close a converted model is to the model it was."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from blockgate.errors import invalid

__all__ = ["call", "evaluating", "floating_tensors", "relative_difference", "run_example"]


def call(model: nn.Module, example: Any) -> Any:
    """What `model` returns for an example: a tuple of arguments, a mapping of keyword arguments, or one argument."""
    if isinstance(example, Mapping):
        return model(**example)
    # A PackedSequence is a tuple too, but one argument.
    return model(*example) if type(example) is tuple else model(example)


def run_example(model: nn.Module, example: Any) -> list[Tensor]:
    """All floating tensors that `model` returns for an example, in eval mode and without gradients.

    Args:
        model: any module; its training flags are left as they were.
        example: a tuple of arguments, a mapping of keyword arguments, or anything else as the one argument.
    """
    with evaluating(model), torch.no_grad():
        outputs = call(model, example)
    found = list(floating_tensors(outputs))
    if not found or any(t.is_meta for t in found):
        raise invalid(
            "example_input",
            expected="an input for which the model returns floating tensors with values",
            got=type(outputs).__name__ if not found else "a tensor on the meta device",
            remedy="Leave it out, or give the model its weights first.",
        )
    return found


def relative_difference(after: list[Tensor], before: list[Tensor]) -> float:
    """|after - before| / |before| over all tensors; 0 where both are 0."""
    if [t.shape for t in after] != [t.shape for t in before]:
        raise invalid(
            "example_input",
            expected=f"outputs of the same shapes, {[tuple(t.shape) for t in before]}",
            got=[tuple(t.shape) for t in after],
            remedy="The model's output must depend only on its input.",
        )
    moved = sum((a.double() - b.double()).square().sum().item() for a, b in zip(after, before, strict=True))
    size = sum(b.double().square().sum().item() for b in before)
    if not size:
        return math.inf if moved else 0.0
    return math.sqrt(moved / size)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode, and torch's own attention shortcuts off, which give padded positions other values."""
    flags = {module: module.training for module in model.modules()}
    shortcuts = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(shortcuts)
        for module, training in flags.items():
            module.training = training


def floating_tensors(outputs: Any) -> Iterator[Tensor]:
    """All floating tensors in what a model returned, in its order."""
    if isinstance(outputs, Tensor):
        if outputs.is_floating_point():
            yield outputs
    elif isinstance(outputs, (Mapping, tuple, list)):
        for part in outputs.values() if isinstance(outputs, Mapping) else outputs:
            yield from floating_tensors(part)
