"""Words drawn from a language model, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from blockgate.errors import invalid
from blockgate.grid import check_seed
from blockgate.lab.data import Vocabulary
from blockgate.lab.data.corpus import END_OF_SENTENCE
from blockgate.lab.models.language_model import LanguageModel

__all__ = ["sample"]


def sample(
    model: LanguageModel,
    vocabulary: Vocabulary,
    *,
    prompt: Sequence[str] = (),
    words: int = 100,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[str]:
    """Yields the words that follow `<eos>` and the prompt.

    Args:
        model: a `LanguageModel`, or a packed one, in eval mode.
        vocabulary: its words.
        prompt: words to begin with.
        words: how many to draw.
        temperature: divides the log-probabilities; 0 takes the likeliest word.
        top_k: how many of the likeliest words to draw among; None for all.
        seed: of the drawing.
    """
    unknown = [word for word in prompt if word not in vocabulary]
    if unknown:
        raise invalid(
            "prompt",
            expected="words of the vocabulary",
            got=" ".join(unknown),
            remedy="Leave them out, or write <unk>.",
        )
    if not 0 <= temperature < float("inf"):
        raise invalid("temperature", expected="a number from 0", got=temperature, remedy="Try 0.8.")
    if words < 1 or (top_k is not None and top_k < 1):
        raise invalid("words and top_k", expected="at least 1", got=(words, top_k), remedy="Give larger numbers.")
    check_seed("seed", seed)
    return _draw(model, vocabulary, [END_OF_SENTENCE, *prompt], words, temperature, top_k, seed)


@torch.no_grad()
def _draw(
    model: LanguageModel,
    vocabulary: Vocabulary,
    before: list[str],
    words: int,
    temperature: float,
    top_k: int | None,
    seed: int,
) -> Iterator[str]:
    generator = torch.Generator().manual_seed(seed)
    read, carried = vocabulary.encode(before)[:, None], None
    # How many of the likeliest words need be known.
    kept = 1 if temperature == 0 else None if top_k is None else min(top_k, len(vocabulary))
    for _ in range(words):
        if kept is None:
            log_probabilities, carried = model(read, carried)
            scores, numbers = log_probabilities[-1, 0].sort(descending=True)
        else:
            scores, numbers, carried = model.likeliest(read, carried, k=kept)
            scores, numbers = scores[0], numbers[0]
        number = _choose(scores, numbers, temperature, generator)
        yield vocabulary.words[int(number)]
        read = number.view(1, 1)


def _choose(scores: Tensor, numbers: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One of the words (k,) whose scores (k,) fall: log-probabilities, or what differs from them by one number."""
    if temperature == 0:
        return numbers[:1]
    return numbers[torch.multinomial((scores / temperature).softmax(dim=0), 1, generator=generator)]
