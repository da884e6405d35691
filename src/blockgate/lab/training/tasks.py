"""The task of each kind of run."""

from __future__ import annotations

from blockgate.lab.data import Vocabulary
from blockgate.lab.training.config import ImageRun, LanguageModelRun, Run
from blockgate.lab.training.image_task import ImageTask
from blockgate.lab.training.language_task import LanguageTask
from blockgate.lab.training.task import ALONE, Share, Step, Task

__all__ = ["ImageTask", "LanguageTask", "Share", "Step", "Task", "make_task"]


def make_task(run: Run, share: Share = ALONE, vocabulary: Vocabulary | None = None) -> Task:
    """The task of a run."""
    if isinstance(run, ImageRun):
        return ImageTask(run, share)
    assert isinstance(run, LanguageModelRun)
    return LanguageTask(run, share, vocabulary)
