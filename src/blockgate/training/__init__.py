"""Runs: configs, the training loop, hooks, checkpoints and logs. Needs the extra `train`."""

from blockgate.training.checkpoint import Trained, load_trained
from blockgate.training.config import ImageRun, LanguageModelRun, Run, load_run, shipped_configs
from blockgate.training.evaluation import evaluate
from blockgate.training.hooks import Hook
from blockgate.training.loop import train

__all__ = [
    "Hook",
    "ImageRun",
    "LanguageModelRun",
    "Run",
    "Trained",
    "evaluate",
    "load_run",
    "load_trained",
    "shipped_configs",
    "train",
]
