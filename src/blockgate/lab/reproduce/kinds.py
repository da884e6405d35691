"""The kinds of arms: how the run of each follows from that of its task, and how a trained model of it is timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from blockgate.convert import pack
from blockgate.lab.baselines import to_block_inference, to_sparse_inference
from blockgate.lab.models import LanguageModel, count_costs, small_dense
from blockgate.lab.training.config import PruningConfig, RampConfig
from blockgate.spec import GateSpec

__all__ = ["KINDS", "Kind", "dense_run", "pack_blocks", "pruned_run", "square"]

# What slow gates learn at, as a share of the learning rate: more of them depend on the input then.
SLOW_GATE_RATE = 0.3

# Gated models with square blocks, whose multiply-adds small dense models of the kind "small" have.
SQUARE_KINDS = ("dynamic", "dynamic-best", "dynamic-slow")

# The paper prunes every 3 epochs between 1 and 25 of 55; other runs at the same shares of their epochs.
AGP_BEGIN, AGP_END, AGP_EVERY, AGP_EPOCHS = 1, 25, 3, 55


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of arms: an entry of KINDS makes it known to tables, pictures and timing.

    Args:
        label: what tables call it.
        run: makes the run of an arm from that of its task, the sparsity, and the size of the vocabulary.
        look: colour and mark in pictures; None to be left out of them.
        is_dynamic: whether its gates choose blocks for every input.
        is_small: whether it is a dense model that was made smaller until it costs what a gated one does.
        changes_recipe: whether it may differ from other arms in more than the kind of its matrices.
        pack: makes a model ready for inference with weights of a format, as `blockgate.pack`, `screened` included.
        other_ways: further ways to run a model, by the names of their columns.
    """

    label: str
    run: Callable[[Any, float, int], Any]
    look: tuple[str, str] | None = None
    is_dynamic: bool = False
    is_small: bool = False
    changes_recipe: bool = False
    pack: Callable[..., nn.Module] = pack
    other_ways: Mapping[str, Callable[[nn.Module], nn.Module]] = field(default_factory=dict)


def square(gate: GateSpec) -> GateSpec:
    """The same gate with square blocks of the same area."""
    side = math.isqrt(math.prod(gate.block_size))  # type: ignore[arg-type]
    return replace(gate, block_size=(side, side))


def dense_run(base: Any, sparsity: float = 0.0, words: int = 0) -> Any:  # noqa: ARG001
    """Dense matrices, and no ramp."""
    optimizer = replace(base.optimizer, gate_lr=None, revive=0.0)
    return replace(base, model=replace(base.model, matrices="dense"), ramp=RampConfig(), optimizer=optimizer)


def pruned_run(base: Any, sparsity: float, words: int = 0, *, blocks: bool = False) -> Any:  # noqa: ARG001
    """Dense matrices whose weights, or blocks, are pruned gradually."""
    share = base.epochs / AGP_EPOCHS
    pruning = PruningConfig(
        sparsity=sparsity,
        begin=AGP_BEGIN * share,
        end=AGP_END * share,
        every=AGP_EVERY * share,
        block_size=square(base.model.gate).block_size if blocks else None,
    )
    made = replace(dense_run(base), pruning=pruning)
    # Whoever packs the model reads the blocks there.
    return replace(made, model=replace(made.model, gate=square(base.model.gate))) if blocks else made


def _dynamic_run(
    base: Any,
    sparsity: float,
    words: int,  # noqa: ARG001
    *,
    normalise: str = "rms",
    select: str = "per_row",
    gate_rate: float | None = None,
) -> Any:
    """The paper's gate, or its better relatives: square blocks, none of them revived."""
    gate = replace(square(base.model.gate), gate="topk", sparsity=sparsity, normalise=normalise, select=select)
    rate = None if gate_rate is None else gate_rate * base.optimizer.lr
    return replace(
        base,
        model=replace(base.model, matrices="dynamic", gate=gate),
        optimizer=replace(base.optimizer, gate_lr=rate, revive=0.0),
    )


def _static_run(base: Any, sparsity: float, words: int) -> Any:  # noqa: ARG001
    gate = replace(square(base.model.gate), gate="topk", normalise="rms", sparsity=sparsity)
    return replace(dense_run(base), model=replace(base.model, matrices="static", gate=gate))


def _small_run(base: Any, sparsity: float, words: int, *, against: Sequence[str] = SQUARE_KINDS) -> Any:
    """A dense model with at least the multiply-adds of the dearest of some kinds: rounding to whole blocks differs."""
    gated = [KINDS[kind].run(base, sparsity, words).model for kind in against]
    with torch.device("meta"):
        macs = max(count_costs(LanguageModel(model, words)).macs for model in gated)
    made = dense_run(base)
    return replace(made, model=small_dense(made.model, words, macs))


def pack_blocks(model: nn.Module, stored_as: str, *, screened: str | tuple[str, ...] = ()) -> nn.Module:
    """Packs a model that was pruned in blocks, so that closed ones are not computed."""
    size: Any = model.config.gate.block_size  # type: ignore[union-attr]
    return to_block_inference(model, stored_as, block_size=size, screened=screened)


# Colours that colour-blind readers can tell apart (Okabe and Ito), and marks for those who print in grey.
KINDS: dict[str, Kind] = {
    "dense": Kind(label="dense", run=dense_run, look=("#000000", "o")),
    "dynamic": Kind(
        label="dynamic, Eq. 1",
        run=partial(_dynamic_run, normalise="mean", select="global"),
        look=("#56B4E9", "v"),
        is_dynamic=True,
    ),
    "dynamic-best": Kind(label="dynamic, rms + per row", run=_dynamic_run, look=("#0072B2", "D"), is_dynamic=True),
    "dynamic-slow": Kind(
        label="dynamic, rms + per row, slow gates",
        run=partial(_dynamic_run, gate_rate=SLOW_GATE_RATE),
        look=("#D55E00", "d"),
        is_dynamic=True,
    ),
    "agp": Kind(
        label="magnitude pruning (AGP)",
        run=pruned_run,
        look=("#E69F00", "s"),
        other_ways={"CSR": lambda model: pack(to_sparse_inference(model))},
    ),
    "block-agp": Kind(
        label="AGP of whole blocks", run=partial(pruned_run, blocks=True), look=("#CC79A7", "P"), pack=pack_blocks
    ),
    "static": Kind(label="static blocks", run=_static_run, look=("#009E73", "X"), pack=pack_blocks),
    "small": Kind(label="small dense of equal MACs", run=_small_run, look=("#999999", "^"), is_small=True),
    "small-margin": Kind(
        label="small dense of the MACs of margin",
        run=partial(_small_run, against=("margin",)),
        look=("#999999", "^"),
        is_small=True,
    ),
}
