"""Before the loop: checks of a run, the processes it takes, and what Ctrl-C does."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from blockgate.errors import invalid, missing_extra
from blockgate.grid import check_seed, check_threads
from blockgate.lab.training.config import Run

if TYPE_CHECKING:
    from lightning.fabric import Fabric

__all__ = ["check_run", "deferred_interrupt", "launch"]


def check_run(run: Run) -> None:
    """Refuses what can't work before any time is spent."""
    for name in ("epochs", "batch_size", "eval_batch_size", "devices", "log_every"):
        if getattr(run, name) < 1:
            raise invalid(name, expected="at least 1", got=getattr(run, name), remedy="Give a larger number.")
    for name in ("batch_size", "eval_batch_size"):
        if getattr(run, name) % run.devices:
            raise invalid(
                name,
                expected=f"a multiple of {run.devices} devices",
                got=getattr(run, name),
                remedy="Change one of them.",
            )
    for name, value in {
        "optimizer.momentum": run.optimizer.momentum,
        "optimizer.weight_decay": run.optimizer.weight_decay,
        "optimizer.clip": run.optimizer.clip or 0.0,
        "optimizer.average_after": run.optimizer.average_after,
        "schedule.patience": run.schedule.patience,
        "schedule.warmup": run.schedule.warmup,
        "pruning.begin": run.pruning.begin,
        "pruning.every": run.pruning.every,
        "checkpoint_seconds": run.checkpoint_seconds,
    }.items():
        if not value >= 0:  # NaN included
            raise invalid(name, expected="a number from 0", got=value, remedy="Give a larger number.")
    check_seed("seed", run.seed)
    if run.threads is not None:
        check_threads("threads", run.threads)
    if run.pruning.sparsity and run.pruning.end > run.epochs:
        raise invalid(
            "pruning.end",
            expected=f"at most {run.epochs} epochs, as the run has",
            got=run.pruning.end,
            remedy="The last pruning must be over before the end.",
        )
    there = run.output / "run.json"
    if run.resume and not there.is_file():
        raise invalid("--resume", expected="a folder with a run", got=str(run.output), remedy="Check --output.")
    if not run.resume and there.is_file():
        raise invalid(
            "--output", expected="a new folder", got=f"{run.output}, which has a run", remedy="Add --resume to go on."
        )


def launch(run: Run) -> Fabric:
    """Fabric, with all processes started."""
    try:
        # Here because it takes seconds, which `blockgate --help` shouldn't; with all else that a run will need.
        import rich.progress  # noqa: F401
        import tensorboard  # type: ignore[import-untyped]  # noqa: F401
        from lightning.fabric import Fabric
    except ImportError as error:
        raise missing_extra("training", error) from None
    # Which of them speaks depends on what else of Lightning was imported.
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        fabric = Fabric(
            accelerator=run.accelerator,
            devices=run.devices,
            strategy="ddp" if run.devices > 1 else "auto",
            precision=run.precision,  # type: ignore[arg-type]
        )
    except (ValueError, RuntimeError, TypeError) as error:
        raise invalid(
            "accelerator, devices and precision",
            expected="what Lightning Fabric can run here",
            got=f"{run.accelerator}, {run.devices}, {run.precision}: {' '.join(str(error).split())[:200]}",
            remedy="Try --accelerator cpu --devices 1 --precision 32-true.",
        ) from None
    fabric.launch()
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    return fabric


@contextmanager
def deferred_interrupt(note: Callable[[], None]) -> Iterator[None]:
    """Notes the first Ctrl-C instead of raising, so that an update isn't torn apart; the second one raises."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(*_: Any) -> None:
        note()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    old = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)
