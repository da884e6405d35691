"""Runs: configs, the training loop, hooks, checkpoints and logs. Needs the extra `train`."""

from blockgate.lab.training.atlas import read_history, record_tour
from blockgate.lab.training.checkpoint import Trained, load_trained
from blockgate.lab.training.config import ImageRun, LanguageModelRun, Run
from blockgate.lab.training.config_files import load_run, shipped_configs
from blockgate.lab.training.evaluation import evaluate, record_test
from blockgate.lab.training.hooks import Hook
from blockgate.lab.training.loop import train

__all__ = [
    "Hook",
    "ImageRun",
    "LanguageModelRun",
    "Run",
    "Trained",
    "evaluate",
    "load_run",
    "load_trained",
    "read_history",
    "record_test",
    "record_tour",
    "shipped_configs",
    "train",
]
