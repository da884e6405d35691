"""A whole LSTM language model, words in and probabilities of the next word out, against other engines."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockgate.convert import pack
from blockgate.inspect.timing import carry_on, in_turn
from blockgate.lab.bench.checks import by_reference, open_gates, packed_dense_name, require_close
from blockgate.lab.bench.comparison import Arm, Comparison
from blockgate.lab.bench.engines import engines
from blockgate.lab.models import LanguageModel, LanguageModelConfig
from blockgate.layers import DynamicSparseLSTM

if TYPE_CHECKING:
    from collections.abc import Callable

    from blockgate.lab.bench.recurrent import Floors, RecurrentCase

__all__ = ["compare_language_models", "dense_model", "random_words"]

INPUTS = 16


def dense_model(case: RecurrentCase, vocabulary: int) -> LanguageModel:
    """The dense model that is compared: embedding, layers and decoder of one width, each with weights of its own."""
    config = LanguageModelConfig(
        embedding_size=case.hidden, hidden_size=case.hidden, num_layers=case.layers, tied=False
    )
    return LanguageModel(config, vocabulary).eval()


@torch.no_grad()
def compare_language_models(case: RecurrentCase, vocabulary: int, floors: Floors) -> Comparison:
    """Ours packed to int8 at each sparsity, decoder dense, against the dense model in other engines.

    Args:
        case: sizes; `steps` words are read in one call, the state is carried on.
        vocabulary: number of words.
        floors: the least speed-up over the fastest of the engines, by sparsity.
    """
    torch.manual_seed(0)
    dense, words = dense_model(case, vocabulary), random_words(case, vocabulary)
    arms, left_out = [], {}
    for name, build in engines(words[0]).items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step = build(dense)
                step(words[0], None)
            arms.append(Arm(name=name, call=in_turn(words, carry_on(step)), rival=True))
        except (ImportError, RuntimeError, NotImplementedError) as error:
            left_out[name] = str(error).splitlines()[0]
    # The dense model packed alike: what of the gain has nothing to do with gates.
    packed = pack(dense, torch.int8)
    require_close(_centred(packed(words[0])[0]), _centred(dense(words[0])[0]), packed_dense_name(torch.int8))
    arms.append(Arm(name=packed_dense_name(torch.int8), call=in_turn(words, carry_on(packed))))
    for sparsity, floor in floors.items():
        name = f"blockgate int8 {sparsity:.0%}, dense decoder"
        gated = _packed(dense, sparsity, case, words[0])
        arms.append(Arm(name=name, call=in_turn(words, carry_on(gated)), floor=floor))
    work = f"LSTM language model, {vocabulary} words, {case.sizes}"
    return Comparison(work=work, arms=arms, left_out=left_out)


def _packed(dense: LanguageModel, sparsity: float, case: RecurrentCase, words: Tensor) -> Callable[..., Any]:
    gated = copy.deepcopy(dense)
    lstm: Any = gated.layers[0]
    gated.layers[0] = open_gates(DynamicSparseLSTM.from_dense(lstm, sparsity=sparsity, **case.gate_options))
    packed = pack(gated.eval(), torch.int8)
    found, expected = (_centred(model(words)[0]) for model in (packed, by_reference(gated, packed)))
    require_close(found, expected, f"int8 at {sparsity:.0%}")
    return packed


def _centred(log_probabilities: Tensor) -> Tensor:
    """Without the mean over words, which all models nearly share: beside it, errors would look small."""
    return log_probabilities - log_probabilities.mean(dim=-1, keepdim=True)


def random_words(case: RecurrentCase, vocabulary: int) -> list[Tensor]:
    """Texts (T, N) that arms read in turn."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocabulary, (case.steps, case.batch), generator=generator) for _ in range(INPUTS)]
