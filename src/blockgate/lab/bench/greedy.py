"""The likeliest next word of a whole LSTM language model, its output layer dense or screened, against other engines."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from blockgate.convert import pack
from blockgate.errors import BlockgateError
from blockgate.inspect.timing import carry_on, in_turn
from blockgate.lab.bench.checks import open_gates, packed_dense_name
from blockgate.lab.bench.comparison import Arm, Comparison
from blockgate.lab.bench.engines import engines, greedy_step
from blockgate.lab.bench.language_model import dense_model, random_words
from blockgate.layers import DynamicSparseLSTM
from blockgate.runtime.packed import PackedDynamicSparseLinear, PackedLinear
from blockgate.runtime.screened import ScreenedLinear

if TYPE_CHECKING:
    from blockgate.lab.bench.recurrent import Floors, RecurrentCase
    from blockgate.lab.models import LanguageModel

__all__ = ["compare_greedy", "read_bytes", "spread_scores_"]

# Bytes of a weight in the engines that are compared.
WEIGHT_BYTES = {"fp32": 4, "int8": 1}


@torch.no_grad()
def compare_greedy(case: RecurrentCase, vocabulary: int, floors: dict[str, Floors]) -> Comparison:
    """Ours in int8 at each sparsity, the output layer packed to int8 or screened, against the dense model.

    Args:
        case: sizes; `steps` words are read in one call, the state is carried on.
        vocabulary: number of words.
        floors: for "dense" and "screened" output layers the least speed-up over the fastest engine, by sparsity.
    """
    torch.manual_seed(0)
    dense, words = dense_model(case, vocabulary), random_words(case, vocabulary)
    spread_scores_(dense, words)
    arms, left_out = [], {}
    weights = sum(p.numel() for name, p in dense.named_parameters() if not name.startswith("embedding"))
    for name, build in engines(words[0], greedy=True).items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step = build(dense)
                step(words[0], None)
        except (ImportError, RuntimeError, NotImplementedError) as error:
            left_out[name] = str(error).splitlines()[0]
            continue
        size = next(size for kind, size in WEIGHT_BYTES.items() if kind in name)
        arms.append(Arm(name=name, call=in_turn(words, carry_on(step)), rival=True, read=weights * size))
    # The dense model packed alike: what of the gain has nothing to do with gates.
    packed = cast("LanguageModel", pack(dense, torch.int8))
    _require_likeliest(packed, dense, _states(packed, words), packed_dense_name(torch.int8))
    call = in_turn(words, carry_on(greedy_step(packed)))
    arms.append(Arm(name=packed_dense_name(torch.int8), call=call, read=read_bytes(packed)))
    survivors: list[float] = []
    for layer in ("dense", "screened"):
        for sparsity, floor in floors[layer].items():
            model, states = _packed(dense, sparsity, case, words, screened=layer == "screened")
            if layer == "screened":
                survivors.append(float(_decoder(model).count_survivors(states, 1).double().median()))
            arms.append(
                Arm(
                    name=f"blockgate int8 {sparsity:.0%}, {layer} output layer",
                    call=in_turn(words, carry_on(greedy_step(model))),
                    floor=floor,
                    read=read_bytes(model, survivors[-1] if survivors else 0.0),
                )
            )
    counted = ", ".join(f"{count:.0f}" for count in survivors)
    remark = (
        "Weights are random, but scaled so that scores spread as in trained models: a median of "
        f"{counted} of the {vocabulary} words survive the screening."
    )
    work = f"LSTM language model, likeliest of {vocabulary} words, {case.sizes}"
    return Comparison(work=work, arms=arms, left_out=left_out, remarks=(remark,))


def spread_scores_(model: LanguageModel, words: list[Tensor], *, deviation: float = 0.42) -> None:
    """Scales a fresh output layer, and gives it a bias, so that its scores are spread as those of a trained one.

    The bias falls as the logarithm of a word's rank, as words do; the weights add a part of this standard deviation
    that depends on the input.
    """
    decoder = model.softmax.decoder
    scores = _states(model, words) @ decoder.weight.t()
    decoder.weight *= deviation / scores.std(dim=1).mean()
    decoder.bias.copy_(-torch.arange(1.0, model.words + 1).log())


def read_bytes(model: nn.Module, survivors: float = 0.0) -> int:
    """What one token reads of a packed model: open blocks with their scales, gates, scans and the rows that survive."""
    total = 0.0
    for module in model.modules():
        if isinstance(module, PackedLinear):
            share = module.gate.target_density if isinstance(module, PackedDynamicSparseLinear) else 1.0
            total += share * (_bytes(module.packed.blocks) + _bytes(module.packed.scale))
            total += sum(_bytes(p) for name, p in module.named_parameters() if name != "packed")
        elif isinstance(module, ScreenedLinear):
            total += module.scanned_bytes + survivors * module.in_features * module.weight.element_size()
    return round(total)


def _bytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


def _decoder(model: LanguageModel) -> ScreenedLinear:
    return cast("ScreenedLinear", model.softmax.decoder)


def _packed(
    dense: LanguageModel, sparsity: float, case: RecurrentCase, words: list[Tensor], *, screened: bool
) -> tuple[LanguageModel, Tensor]:
    """The gated model, packed and checked, and states that its output layer sees."""
    gated = copy.deepcopy(dense)
    lstm: Any = gated.layers[0]
    gated.layers[0] = open_gates(DynamicSparseLSTM.from_dense(lstm, sparsity=sparsity, **case.gate_options))
    # Its states are larger than those of the dense model, and would leave more words.
    spread_scores_(gated.eval(), words)
    patterns = "softmax.decoder" if screened else ()
    model = cast("LanguageModel", pack(gated, torch.int8, screened=patterns))
    states = _states(model, words)
    _require_likeliest(model, gated, states, f"{sparsity:.0%}", exact=screened)
    return model, states


def _states(model: LanguageModel, words: list[Tensor]) -> Tensor:
    """What the output layer of a model sees when it reads these texts."""
    states, carried = [], None
    for text in words:
        features, carried, _ = model._features(text, carried)
        states.append(features[-1])
    return torch.cat(states)


def _require_likeliest(
    model: LanguageModel, original: LanguageModel, states: Tensor, what: str, *, exact: bool = False
) -> None:
    """Refuses to time a packed model that finds other words; weights of int8 may swap two that are nearly as likely."""
    found = model.softmax.likeliest(states, 1)[1]
    expected = states @ original.softmax.decoder.weight.t() + original.softmax.decoder.bias
    least = expected.max(dim=1).values - (0.0 if exact else 0.1) - 1e-4
    if not bool((expected.gather(1, found).squeeze(1) >= least).all()):
        raise BlockgateError(
            f"bench: expected the likeliest words at {what} before timing, got others. No speed is reported."
        )
