"""Before the loop: checks of a run, the processes it takes, and what Ctrl-C and SIGTERM do."""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from blockgate.checkpoint.atomic import remove_leftovers
from blockgate.errors import invalid, missing_extra
from blockgate.grid import check_seed, check_threads
from blockgate.lab.training.config import Run
from blockgate.lab.training.shards import shard

if TYPE_CHECKING:
    from lightning.fabric import Fabric

__all__ = ["check_run", "deferred_interrupt", "launch", "set_up"]


def check_run(run: Run) -> None:
    """Refuses what can't work before any time is spent."""
    for name in ("epochs", "batch_size", "eval_batch_size", "devices", "nodes", "log_every"):
        if getattr(run, name) < 1:
            raise invalid(name, expected="at least 1", got=getattr(run, name), remedy="Give a larger number.")
    _check_launcher(run)
    for name in ("batch_size", "eval_batch_size"):
        if getattr(run, name) % (run.devices * run.nodes):
            raise invalid(
                name,
                expected=f"a multiple of {run.devices * run.nodes} devices",
                got=getattr(run, name),
                remedy="Change one of them.",
            )
    for name, value in {
        "optimizer.momentum": run.optimizer.momentum,
        "optimizer.weight_decay": run.optimizer.weight_decay,
        "optimizer.clip": run.optimizer.clip or 0.0,
        "optimizer.average_after": run.optimizer.average_after,
        "optimizer.average_from": run.optimizer.average_from or 0.0,
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
    if run.optimizer.average_from is not None:
        ends = (run.ramp.end, run.anneal.end, run.pruning.end if run.pruning.sparsity else 0.0)
        if not max(ends) <= run.optimizer.average_from < run.epochs:
            raise invalid(
                "optimizer.average_from",
                expected=f"from {max(ends):g}, where ramps and pruning end, to less than {run.epochs} epochs",
                got=run.optimizer.average_from,
                remedy="Averages of models that were less sparse would be no sparse model.",
            )
    if run.strategy == "fsdp" and run.pruning.sparsity:
        raise invalid(
            "strategy", expected="auto or ddp with pruning", got="fsdp", remedy="Pruning looks at whole matrices."
        )
    there = run.output / "run.json"
    # torchrun gives the same words whenever it restarts the processes.
    if run.resume and not there.is_file() and "TORCHELASTIC_RUN_ID" not in os.environ:
        raise invalid("--resume", expected="a folder with a run", got=str(run.output), remedy="Check --output.")
    if not run.resume and there.is_file():
        raise invalid(
            "--output", expected="a new folder", got=f"{run.output}, which has a run", remedy="Add --resume to go on."
        )


def _check_launcher(run: Run) -> None:
    """Refuses to wait for processes that nobody starts, and to train without those that somebody has started."""
    environment = os.environ
    if "TORCHELASTIC_RUN_ID" in environment:
        launcher, options = "torchrun", f"--nnodes {run.nodes} --nproc-per-node {run.devices}"
        each, world = int(environment["LOCAL_WORLD_SIZE"]), int(environment["WORLD_SIZE"])
    # As Lightning tells it: by their names, these jobs are shells for people.
    elif "SLURM_NTASKS" in environment and environment.get("SLURM_JOB_NAME") not in {"bash", "interactive"}:
        launcher, options = "srun", f"--nodes {run.nodes} --ntasks-per-node {run.devices}"
        # Without srun there is one process, however many tasks the job may have.
        by_srun = "SLURM_STEP_ID" in environment
        world = int(environment["SLURM_NTASKS"]) if by_srun else 1
        each = world // int(environment.get("SLURM_NNODES", "1")) if by_srun else 1
    elif run.nodes == 1:
        return
    else:
        raise invalid(
            "nodes",
            expected="1, or torchrun or srun to start the processes of all machines",
            got=run.nodes,
            remedy=f"Run it on every machine with torchrun --nnodes {run.nodes} --nproc-per-node {run.devices} "
            "--rdzv-backend c10d --rdzv-endpoint HOST:29400 -m blockgate train ...",
        )
    if (each, world) != (run.devices, run.devices * run.nodes):
        raise invalid(
            "devices and nodes",
            expected=f"as many processes as {launcher} has started, {each} on each machine and {world} in all",
            got=f"--devices {run.devices} --nodes {run.nodes}",
            remedy=f"Change them, or give {launcher} {options}.",
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
        with warnings.catch_warnings():
            # Where Slurm is installed, Lightning advises it to every process that Slurm did not start.
            warnings.filterwarnings("ignore", "The `srun` command is available")
            fabric = Fabric(
                accelerator=run.accelerator,
                devices=run.devices,
                num_nodes=run.nodes,
                strategy=_strategy(run),
                **_precision(run),
            )
    except (ValueError, RuntimeError, TypeError) as error:
        raise invalid(
            "accelerator, devices, strategy and precision",
            expected="what Lightning Fabric can run here",
            got=f"{run.accelerator}, {run.devices}, {run.strategy}, {run.precision}: "
            f"{' '.join(str(error).split())[:200]}",
            remedy="Try --accelerator cpu --devices 1 --precision 32-true.",
        ) from None
    fabric.launch()
    if fabric.is_global_zero:
        remove_leftovers(run.output)
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    return fabric


def _strategy(run: Run) -> Any:
    """How processes share the work, as Fabric takes it."""
    world = run.devices * run.nodes
    if run.strategy == "fsdp":
        from lightning.fabric.strategies.model_parallel import ModelParallelStrategy

        return ModelParallelStrategy(shard, data_parallel_size=world, tensor_parallel_size=1)
    return "ddp" if world > 1 or run.strategy == "ddp" else "auto"


def _precision(run: Run) -> dict[str, Any]:
    """What models compute in, as Fabric takes it."""
    if run.precision != "64-true":
        return {"precision": run.precision}
    from lightning.fabric.plugins.precision import DoublePrecision

    class Double(DoublePrecision):
        """Leaves losses and carried states as they are, where Lightning's rounds them to float32."""

        def convert_output(self, data: Any) -> Any:
            return data

    # As a plugin it works with every strategy; Fabric knows no name for it together with fsdp.
    return {"plugins": [Double()]}


def set_up(fabric: Fabric, module: nn.Module) -> Any:
    """The module as Fabric wraps it, with calls of its `loss` as calls of itself.

    Precision, gradients and shards are seen to where a module is called. Fabric's `mark_forward_method` does this for
    strategies that put another module around it, and only for those.
    """
    model: Any = fabric.setup_module(module)
    if not hasattr(module, "loss"):
        return model
    loss = module.loss

    def call(*args: Any) -> Any:
        module.forward = loss  # type: ignore[assignment]
        try:
            return model(*args)
        finally:
            # The method of the class is there again.
            del module.forward

    vars(model)["loss"] = call
    return model


@contextmanager
def deferred_interrupt(note: Callable[[], None]) -> Iterator[None]:
    """Notes the first Ctrl-C or SIGTERM instead of ending, so that an update isn't torn apart; the second one ends.

    A SIGTERM that somebody else handles stays theirs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ends: dict[int, Any] = {signal.SIGINT: signal.default_int_handler}
    if signal.getsignal(signal.SIGTERM) in {signal.SIG_DFL, signal.default_int_handler}:
        ends[signal.SIGTERM] = signal.getsignal(signal.SIGTERM)

    def handle(*_: Any) -> None:
        note()
        for number, end in ends.items():
            signal.signal(number, end)

    before = {number: signal.signal(number, handle) for number in ends}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
