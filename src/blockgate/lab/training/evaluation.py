"""How well a trained model does, and what its gates decide."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from blockgate.inspect import GateRecord, record_gates
from blockgate.lab.training.checkpoint import Trained
from blockgate.lab.training.gate_health import gate_facts, has_gates
from blockgate.lab.training.tasks import ImageTask, LanguageTask, make_task
from blockgate.schedule import set_sparsity

__all__ = ["evaluate", "record_test"]


@torch.no_grad()
def evaluate(trained: Trained, part: str, *, sparsity: float | None = None) -> dict[str, float]:
    """Metrics of a trained model on "valid" or "test".

    With gates, also how many open and how many depend on inputs; of a language model the share of words that its
    vocabulary lacks, where there are any.

    Args:
        trained: the model, and the run that says on which data and with which batch size.
        part: "valid" or "test".
        sparsity: set for all gates first; None for that of the checkpoint.
    """
    if sparsity is not None:
        set_sparsity(trained.model, sparsity)
    task = make_task(trained.run, vocabulary=trained.vocabulary)
    missing = task.corpus.missing[part] if isinstance(task, LanguageTask) else 0.0
    unknown = {"missing_words": missing} if missing else {}
    if not has_gates(trained.model):
        return task.metrics(task.evaluate(trained.model, part, torch.device("cpu"))) | unknown
    with record_gates(trained.model, coactivation=False) as record:
        metrics = task.metrics(task.evaluate(trained.model, part, torch.device("cpu")))
    return metrics | unknown | gate_facts(record)


@torch.no_grad()
def record_test(trained: Trained) -> GateRecord:
    """All decisions of a gated model on the test data, by class where the data has some."""
    task = make_task(trained.run, vocabulary=trained.vocabulary)
    with (
        record_gates(trained.model, coactivation=False) as record,
        record.labelled(task.parts["test"][1]) if isinstance(task, ImageTask) else nullcontext(),
    ):
        task.evaluate(trained.model, "test", torch.device("cpu"))
    return record
