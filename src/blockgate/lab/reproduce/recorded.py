"""What the gates of a trained model decide on the test data."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from blockgate.inspect import GateRecord, record_gates
from blockgate.lab.training import Trained
from blockgate.lab.training.tasks import ImageTask, make_task

__all__ = ["record_test"]


@torch.no_grad()
def record_test(trained: Trained) -> GateRecord:
    """The record of all decisions, by class where the data has some."""
    task = make_task(trained.run, vocabulary=trained.vocabulary)
    with (
        record_gates(trained.model, coactivation=False) as record,
        record.labelled(task.parts["test"][1]) if isinstance(task, ImageTask) else nullcontext(),
    ):
        task.evaluate(trained.model, "test", torch.device("cpu"))
    return record
