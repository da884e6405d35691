"""The ablations: one gated model, and what becomes of it when one thing is changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from blockgate.lab.reproduce.arms import NO_DROPOUT, Arm, at_sparsities
from blockgate.lab.reproduce.experiment import Experiment
from blockgate.lab.reproduce.kinds import KINDS, Kind, dense_run, pruned_run
from blockgate.lab.training.config import AnnealConfig, RampConfig
from blockgate.spec import DEFAULT_KEY_SIZE

__all__ = ["ABLATIONS", "DENSE_CHANGES", "EXPERIMENT", "PRUNED_CHANGES", "Ablation"]

# Ramps reach their end after this share of the epochs.
RAMP_SHARE = 0.5
# Temperatures reach their end after this one: gates and layers have the rest of the time to agree.
ANNEAL_SHARE = 0.8
ANNEAL_CLIP = 1.0


class Ablation(NamedTuple):
    """One change: what tables call it, and how it makes the changed run of a plain one."""

    label: str
    change: Callable[[Any], Any]


def _gate(**options: Any) -> Callable[[Any], Any]:
    return lambda run: replace(run, model=replace(run.model, gate=replace(run.model.gate, **options)))


def _scaled(name: str, times: float) -> Callable[[Any], Any]:
    """An option of the gates that is a number of features, times something."""

    def change(run: Any) -> Any:
        value = getattr(run.model.gate, name)
        in_numbers = {"auto": DEFAULT_KEY_SIZE, None: run.model.hidden_size}
        size = in_numbers.get(value, value)
        scaled = tuple(int(times * part) for part in size) if isinstance(size, tuple) else int(times * size)
        return _gate(**{name: scaled})(run)

    return change


def _model(**options: Any) -> Callable[[Any], Any]:
    return lambda run: replace(run, model=replace(run.model, **options))


def _output_dropout(run: Any) -> Any:
    return _model(dropout=0.0, output_dropout=run.model.dropout)(run)


def _other_kind(kind: str, **options: Any) -> Callable[[Any], Any]:
    """Other kinds of gates have neither normalise nor select."""
    return _gate(gate=kind, normalise=None, select=None, **options)


def _ramp(run: Any) -> Any:
    return replace(run, ramp=RampConfig(end=RAMP_SHARE * run.epochs, every="update"))


def _annealed(final: float, *, large: bool = False) -> Callable[[Any], Any]:
    """softmax_sum gates whose temperature falls to `final`, where it stays for the last epochs.

    A soft gate has a gradient of 1 / temperature: it is clipped where the recipe doesn't.
    """

    def change(run: Any) -> Any:
        run = (_large_softmax_sum if large else _other_kind("softmax_sum"))(run)
        optimizer = replace(run.optimizer, clip=run.optimizer.clip or ANNEAL_CLIP)
        return replace(run, anneal=AnnealConfig(end=ANNEAL_SHARE * run.epochs, final=final), optimizer=optimizer)

    return change


def _large(run: Any) -> Any:
    """Blocks of twice the size, and one epoch: what softmax_sum, which opens all blocks in training, has time for."""
    return replace(_scaled("block_size", 2)(run), epochs=1)


def _large_softmax_sum(run: Any) -> Any:
    return _other_kind("softmax_sum")(_large(run))


def _rate(times: float) -> Callable[[Any], Any]:
    return lambda run: replace(run, optimizer=replace(run.optimizer, lr=times * run.optimizer.lr))


def _gate_rate(times: float) -> Callable[[Any], Any]:
    return lambda run: replace(run, optimizer=replace(run.optimizer, gate_lr=times * run.optimizer.lr))


def _start_from_dense(run: Any) -> Any:
    """The dense arm of the same task and seed lies beside."""
    task = re.split("-from-dense|-distilled", run.output.parent.name)[0]
    near = _gate(near_dense=True)(run)
    return replace(near, start=run.output.parent.parent / f"{task}-dense" / run.output.name)


def _distil(run: Any) -> Any:
    return replace(_start_from_dense(run), distil=0.5)


# The dense model's own recipe comes first: all others take it over.
DENSE_CHANGES = {
    "dense-slower": Ablation("dense, a third of the learning rate", _rate(1 / 3)),
    "dense-faster": Ablation("dense, twice the learning rate", _rate(2)),
    "dense-more-dropout": Ablation("dense, dropout of 0.2", _model(dropout=0.2)),
    "dense-no-projection": Ablation("dense, no projection before the output", _model(projection=False)),
}
# Magnitude pruning gets its own dropout too.
PRUNED_CHANGES = {
    "agp-more-dropout": Ablation("magnitude pruning (AGP), dropout of 0.2", _model(dropout=0.2)),
}
ABLATIONS = {
    "plain": Ablation("as configured: rms, per row, small key", lambda run: run),
    "eq-1": Ablation("Eq. 1: mean, among all blocks", _gate(normalise="mean", select="global")),
    "mean": Ablation("mean, per row", _gate(normalise="mean")),
    "global": Ablation("rms, among all blocks", _gate(select="global")),
    "unnormalised": Ablation("no normalisation, per row", _gate(normalise="none")),
    "ramp": Ablation("ramp over the first half instead of constant sparsity", _ramp),
    "near-dense": Ablation("gates start near 1 (bias 1) instead of half closed (bias 0)", _gate(near_dense=True)),
    "half-key": Ablation("half the key", _scaled("key_size", 0.5)),
    "double-key": Ablation("twice the key", _scaled("key_size", 2)),
    "key-all": Ablation("key of all features", _gate(key_size=None)),
    "low-rank": Ablation("key of all features through a hidden layer of 16", _gate(key_size=None, gate_hidden=16)),
    "half-block": Ablation("blocks of half the size", _scaled("block_size", 0.5)),
    "double-block": Ablation("blocks of twice the size", _scaled("block_size", 2)),
    "slow-gates": Ablation("a tenth of the learning rate for gates", _gate_rate(0.1)),
    "fast-gates": Ablation("ten times the learning rate for gates", _gate_rate(10.0)),
    "softmax-sum": Ablation("softmax_sum gates (Eq. 2), temperature 1", _other_kind("softmax_sum")),
    "softmax-sum-annealed": Ablation("softmax_sum gates (Eq. 2), annealed to 0.1", _annealed(0.1)),
    "softmax-sum-cold": Ablation("softmax_sum gates (Eq. 2), annealed to 0.001", _annealed(0.001)),
    "large": Ablation("blocks of twice the size, 1 epoch", _large),
    "softmax-sum-large": Ablation("the same with softmax_sum gates (Eq. 2), temperature 1", _large_softmax_sum),
    "softmax-sum-large-annealed": Ablation(
        "the same with softmax_sum gates (Eq. 2), annealed to 0.1", _annealed(0.1, large=True)
    ),
    "softmax-sum-large-cold": Ablation(
        "the same with softmax_sum gates (Eq. 2), annealed to 0.01", _annealed(0.01, large=True)
    ),
    "sigmoid": Ablation("sigmoid gates, all blocks open", _other_kind("sigmoid", sparsity=0.0)),
    "weight-drop": Ablation("weight drop of 0.2", _model(weight_dropout=0.2)),
    "no-dropout": Ablation("no dropout", _model(dropout=0.0)),
    "output-dropout": Ablation("dropout of the output alone, where no gate reads it", _output_dropout),
    "more-dropout": Ablation("dropout of 0.2", _model(dropout=0.2)),
    "balance": Ablation("balance loss of 0.01", lambda run: replace(run, balance=0.01)),
    "from-dense": Ablation("start from the trained dense model (twice the updates in all)", _start_from_dense),
    "distilled": Ablation("the same, and half of the loss against the dense model's predictions", _distil),
}


def _gated_run(base: Any, sparsity: float, words: int) -> Any:  # noqa: ARG001
    return _gate(sparsity=sparsity)(base)


def _kinds(changes: dict[str, Ablation], plain: Callable[[Any, float, int], Any]) -> dict[str, Kind]:
    """A kind for each change of the arms that `plain` makes."""

    def changed(ablation: Ablation) -> Callable[[Any, float, int], Any]:
        return lambda base, sparsity, words: ablation.change(plain(base, sparsity, words))

    return {
        name: Kind(label=ablation.label, run=changed(ablation), changes_recipe=True)
        for name, ablation in changes.items()
    }


KINDS.update(
    _kinds(ABLATIONS, _gated_run) | _kinds(DENSE_CHANGES, dense_run) | _kinds(PRUNED_CHANGES, pruned_run),
)


def _arms(scale: str) -> list[Arm]:
    # Many arms: where time is short, with a model and a training of their own.
    task = "ptb-lstm" if scale == "paper" else "ptb-ablation"
    return [
        *(Arm(task, kind) for kind in ("dense", f"dense{NO_DROPOUT}", *DENSE_CHANGES)),
        *at_sparsities(task, [75], "agp", f"agp{NO_DROPOUT}", *PRUNED_CHANGES, *ABLATIONS),
    ]


EXPERIMENT = Experiment(name="ablations", about="what each option of the gates is worth", title="Ablations", arms=_arms)
