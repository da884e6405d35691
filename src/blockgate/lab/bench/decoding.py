"""Trained models as they are timed: one word or image at a time, with the state carried on, and checked before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from blockgate.errors import BlockgateError
from blockgate.inspect.timing import carry_on
from blockgate.lab.bench.checks import relative_error
from blockgate.lab.models import ImageNetwork, LanguageModel

__all__ = ["require_same", "single_steps"]

# Inputs on which outputs are compared.
COMPARED = 8


def single_steps(model: nn.Module) -> dict[str, Callable[[Tensor], Any]]:
    """Calls of the whole "model", and of a language model's recurrent "layers" only; each carries its state on."""
    if isinstance(model, ImageNetwork):
        return {"model": model}
    assert isinstance(model, LanguageModel)
    return {
        "model": carry_on(model),
        "layers": carry_on(lambda words, carried: model.run_layers(model.embedding(words), carried)),
    }


def require_same(name: str, model: nn.Module, original: nn.Module, inputs: list[Tensor], *, exact: bool) -> None:
    """Refuses to time what computes something else.

    Args:
        name: of the model, for the message.
        model: what is to be timed.
        original: the trained model.
        inputs: single words (1, 1) or images.
        exact: whether weights were kept as they are; rounded ones may differ more.
    """
    for part in single_steps(original):
        fast, slow = single_steps(model)[part], single_steps(original)[part]
        for x in inputs[:COMPARED]:
            difference = relative_error(fast(x), slow(x))
            # Rounded weights may tip the scales between two blocks, so that far more than the rounding differs.
            if not difference < (1e-2 if exact else 0.5):
                raise BlockgateError(
                    f"{name}: expected the outputs of the trained model, got others by {difference:.2g} of their norm. "
                    "No speed is reported."
                )
