"""Trained models as they are timed: one word or image at a time, with the state carried on, and checked before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from blockgate.errors import BlockgateError
from blockgate.inspect.timing import carry_on
from blockgate.lab.bench.checks import relative_error
from blockgate.lab.models import ImageNetwork, LanguageModel

__all__ = ["require_likeliest", "require_same", "single_steps"]

# Inputs on which outputs are compared.
COMPARED = 8
# A word that is found may be less likely than the likeliest by this much of its log-probability.
MOST_MISSED = 1.0


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
        inputs: words (1, N), or images.
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


def require_likeliest(name: str, model: nn.Module, original: nn.Module, inputs: list[Tensor]) -> None:
    """Refuses to time a language model that finds other words than the likeliest ones, or as good as those.

    Args:
        name: of the model, for the message.
        model: what is to be timed: it has `likeliest`.
        original: the trained model.
        inputs: words (1, N).
    """
    assert isinstance(model, LanguageModel)
    assert isinstance(original, LanguageModel)
    carried, of_original = None, None
    for x in inputs[:COMPARED]:
        _, found, carried = model.likeliest(x, carried)
        expected, of_original = original(x, of_original)
        missing = float((expected[-1].max(-1).values - expected[-1].gather(1, found)[:, 0]).max())
        # Rounded weights of the layers may tip the scales between two words that are nearly as likely.
        if not missing < MOST_MISSED:
            raise BlockgateError(
                f"{name}: expected the likeliest words, got some whose log-probability is lower by {missing:.2g}. No "
                "speed is reported."
            )
