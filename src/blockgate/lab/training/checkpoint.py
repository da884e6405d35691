"""Checkpoints of runs: written whole or not at all, read without running anybody's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from blockgate.checkpoint.states import read_state, write_state
from blockgate.errors import BlockgateError, invalid
from blockgate.gates import Gate
from blockgate.lab.data import Vocabulary
from blockgate.lab.models import ImageNetwork, LanguageModel
from blockgate.lab.training.config import ImageRun, LanguageModelRun, Run, differences, run_from_plain, run_to_plain

__all__ = [
    "BEST",
    "LAST",
    "Trained",
    "check_resumable",
    "load_checkpoint",
    "load_trained",
    "save_checkpoint",
    "start_from",
]

LAST, BEST = "last.pt", "best.pt"


class Trained(NamedTuple):
    """A trained model with what it was trained by; the vocabulary is that of a language model."""

    model: nn.Module
    run: Run
    vocabulary: Vocabulary | None
    file: Path


def save_checkpoint(file: Path, state: dict[str, Any]) -> None:
    """Writes a state of tensors, numbers, text, lists and dicts."""
    write_state(file, state)


def load_checkpoint(file: Path) -> dict[str, Any]:
    """Reads a state, on the CPU; one that was damaged since it was written is refused."""
    return read_state(
        file,
        writer="blockgate train",
        keys={"run", "model"},
        damaged="Put a copy in its place, or delete it to begin the run again; best.pt is a file of its own.",
        undigested=True,
    )


def check_resumable(run: Run, state: dict[str, Any], fingerprint: str, hooks: int) -> None:
    """Raises unless a run can go on from a checkpoint.

    Args:
        run: what is to go on.
        state: of the checkpoint.
        fingerprint: of the data.
        hooks: how many the run has.
    """
    # More epochs change nothing of those that are done, unless the schedule or a ramp counted on the old end.
    before = state["run"].get("epochs")
    longer = isinstance(before, int) and before < run.epochs
    why = _why_not_longer(run, before, state.get("training", {})) if longer else ""
    changed = differences(state["run"] | ({"epochs": run.epochs} if longer else {}), run_to_plain(run))
    if why:
        changed.append(f"epochs: {before} -> {run.epochs}, but {why}")
    if state.get("fingerprint") != fingerprint:
        changed.append("other data")
    if "training" not in state:
        changed.append("only weights, as in best.pt")
    elif len(state["training"].get("hooks", ())) != hooks:
        changed.append("other hooks")
    if changed:
        raise invalid(
            "--resume",
            expected=f"the config of the run in {run.output}",
            got="; ".join(changed),
            remedy=f"Give the same options, or start another run from these weights: --start {run.output} and another "
            "--output."
            if why
            else "Give the same options, or another --output.",
        )


def _why_not_longer(run: Run, before: int, training: dict[str, Any]) -> str:
    """Why a run of `before` epochs can't have more; empty if it can."""
    if run.schedule.kind == "cosine":
        return f"the cosine schedule ended with epoch {before}: with more epochs all learning rates would be others"
    ends = {
        "sparsity still rises": max(run.ramp.end, run.pruning.end if run.pruning.sparsity else 0.0),
        "the temperature still falls": run.anneal.end,
    }
    for what, end in ends.items():
        if end > before and training.get("epoch", 0) >= before:
            return f"epoch {before} counted as the best although {what} until epoch {end:g}"
    return ""


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
