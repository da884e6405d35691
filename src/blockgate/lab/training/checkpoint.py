"""Checkpoints of runs: written whole or not at all, read without running anybody's code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import torch
from torch import nn

from blockgate.checkpoint.atomic import replace_whole
from blockgate.errors import BlockgateError, invalid
from blockgate.gates import Gate
from blockgate.lab.data import Vocabulary
from blockgate.lab.models import ImageNetwork, LanguageModel
from blockgate.lab.training.config import ImageRun, LanguageModelRun, Run, run_from_plain

__all__ = ["BEST", "LAST", "Trained", "load_checkpoint", "load_trained", "save_checkpoint", "start_from"]

FORMAT = 1
LAST, BEST = "last.pt", "best.pt"


class Trained(NamedTuple):
    """A trained model with what it was trained by; the vocabulary is that of a language model."""

    model: nn.Module
    run: Run
    vocabulary: Vocabulary | None
    file: Path


def save_checkpoint(file: Path, state: dict[str, Any]) -> None:
    """Writes a state of tensors, numbers, text, lists and dicts."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replace_whole(file) as temporary:
        torch.save({"format": FORMAT} | state, temporary)


def load_checkpoint(file: Path) -> dict[str, Any]:
    """Reads a state, on the CPU."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise invalid(
            "checkpoint", expected="a file", got=f"{file}, which isn't there", remedy="Check the path."
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError, BadZipFile) as error:
        reason = " ".join(str(error).split())[:120]
        raise invalid(
            "checkpoint",
            expected="a file that blockgate train wrote",
            got=f"{file} ({reason})",
            remedy="Check the file.",
        ) from None
    if not isinstance(state, dict) or state.get("format") != FORMAT or not {"run", "model"} <= state.keys():
        got = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise invalid(
            "checkpoint",
            expected=f"format {FORMAT} of blockgate train",
            got=f"{file} with {got!r}",
            remedy="Give best.pt or last.pt of a run.",
        )
    return state


def load_trained(path: Path) -> Trained:
    """The model of a checkpoint, in eval mode. A folder stands for the best checkpoint in it, or the last."""
    if path.is_dir():
        path = next((path / name for name in (BEST, LAST) if (path / name).is_file()), path / BEST)
    state = load_checkpoint(path)
    run = run_from_plain(state["run"])
    vocabulary = None
    try:
        if isinstance(run, LanguageModelRun):
            vocabulary = Vocabulary(state["vocabulary"])
            model: nn.Module = LanguageModel(run.model, len(vocabulary))
        else:
            assert isinstance(run, ImageRun)
            model = ImageNetwork(run.model, state["pixels"], state["classes"])
        model.load_state_dict(state["model"])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, BlockgateError) as error:
        raise invalid(
            "checkpoint",
            expected="weights that fit its config",
            got=f"{path}: {' '.join(str(error).split())[:300]}",
            remedy="Train it again with this version.",
        ) from None
    return Trained(model.eval(), run, vocabulary, path)


def start_from(model: nn.Module, path: Path) -> None:
    """Copies the weights of a trained model; gates that it lacks keep their own."""
    weights = load_trained(path).model.state_dict()
    if isinstance(model, LanguageModel):
        weights = model.own_names(weights)
    own = model.state_dict()
    gates = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Gate))
    unfit = [name for name, value in weights.items() if name not in own or own[name].shape != value.shape]
    unfit += [name for name in own if name not in weights and not name.startswith(gates)]
    if unfit:
        raise invalid(
            "start",
            expected="a run of the same sizes, vocabulary and output layer",
            got=f"{path}, which differs in {', '.join(unfit[:4])}",
            remedy="Train one with the same model options and --model.matrices dense.",
        )
    model.load_state_dict(weights, strict=False)
