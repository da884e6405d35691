"""Everything that decides a run, as typed dataclasses, and as plain data for files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from blockgate.errors import invalid
from blockgate.lab.models import ImageNetworkConfig, LanguageModelConfig
from blockgate.lab.models.plain import from_plain, to_plain

__all__ = [
    "AnnealConfig",
    "ImageRun",
    "LanguageModelRun",
    "OptimizerConfig",
    "PruningConfig",
    "RampConfig",
    "Run",
    "ScheduleConfig",
    "run_from_plain",
    "run_to_plain",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """How weights move."""

    kind: Literal["sgd", "adam", "asgd"] = "sgd"
    """asgd is SGD whose weights are averaged from the moment validation stops improving (Merity et al., 2017)."""
    lr: float = 1.0
    """Learning rate."""
    gate_lr: float | None = None
    """Learning rate of the gates' own weights; as the others if unset."""
    revive: float = 0.0
    """What the bias of a block that no row opens rises by at every update, as a share of the gates' learning rate."""
    momentum: float = 0.0
    """Of SGD."""
    weight_decay: float = 0.0
    """Weight decay: pulls weights towards 0."""
    clip: float | None = None
    """Largest norm of the whole gradient."""
    average_after: int = 5
    """asgd: epochs without improvement after which averaging begins."""
    average_from: float | None = None
    """Epochs after which weights are averaged over all updates that follow, with any optimizer; never if unset."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """How learning rates change: all of them are multiplied by one factor."""

    kind: Literal["constant", "plateau", "step", "cosine"] = "constant"
    """plateau and step multiply by `factor`; cosine falls to 0 at the end."""
    factor: float = 0.5
    """What plateau and step multiply by."""
    patience: int = 0
    """plateau: epochs without improvement that are forgiven."""
    begin: float = 1.0
    """step: after how many epochs it first falls."""
    every: float = 1.0
    """step: epochs between falls."""
    warmup: float = 0.0
    """Epochs over which it rises from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RampConfig:
    """When sparsity rises from 0 to that of the model's gates; with end 0 it is constant from the start."""

    begin: float = 0.0
    """Epochs until it starts to rise."""
    end: float = 0.0
    """Epochs until it reaches its final value."""
    shape: Literal["linear", "cubic"] = "linear"
    """The paper's is linear."""
    every: Literal["epoch", "update"] = "epoch"
    """How often it moves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnealConfig:
    """When the temperature of softmax_sum gates falls, a little with every update; with end 0 it stays at 1."""

    begin: float = 0.0
    """Epochs until it starts to fall."""
    end: float = 0.0
    """Epochs until it reaches its final value."""
    initial: float = 1.0
    """Temperature before."""
    final: float = 0.1
    """Temperature from then on; the lower, the nearer are the gates of training to those of evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PruningConfig:
    """Gradual magnitude pruning of dense matrices (Zhu and Gupta, 2017); with sparsity 0 there is none."""

    sparsity: float = 0.0
    """Share of weights, or of blocks, that are gone in the end, in [0, 1)."""
    initial: float = 0.05
    """Share that the first pruning takes."""
    begin: float = 1.0
    """Epochs until the first pruning."""
    end: float = 25.0
    """Epochs until the last pruning."""
    every: float = 3.0
    """Epochs between prunings."""
    block_size: int | tuple[int, int] | None = None
    """Prune whole blocks of this size; single weights if unset."""

    def __post_init__(self) -> None:
        if isinstance(self.block_size, int):
            object.__setattr__(self, "block_size", (self.block_size, self.block_size))


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What all runs have in common."""

    output: Path = Path("runs/run")
    """Folder of the run: checkpoints, logs, results."""
    resume: bool = False
    """Go on with the run in that folder, bit by bit as if it had never stopped. Under torchrun, start it if need be."""
    data: str = ""
    """Name of a published data set, or a folder of your own."""
    data_dir: Path | None = None
    """Where published data sets lie; BLOCKGATE_DATA, or a folder in your cache, if unset."""
    epochs: int = 10
    """Times through the training data."""
    batch_size: int = 20
    """Sequences or images per update, over all devices."""
    eval_batch_size: int = 10
    """Sequences or images at once in evaluation, over all devices."""
    seed: int = 1
    """Seed of all random numbers."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """How weights move."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """How learning rates change."""
    ramp: RampConfig = field(default_factory=RampConfig)
    """When sparsity rises; for models with gates."""
    anneal: AnnealConfig = field(default_factory=AnnealConfig)
    """When gates come to choose; for softmax_sum gates."""
    pruning: PruningConfig = field(default_factory=PruningConfig)
    """When weights are pruned; for models without gates."""
    start: Path | None = None
    """A trained run, or a checkpoint, whose weights to start from; gates that it lacks start fresh."""
    balance: float = 0.0
    """Weight of the loss that makes gates use all blocks evenly, see `bg.inspect.gate_losses`."""
    accelerator: str = "auto"
    """cpu, cuda, mps or auto, as in Lightning Fabric."""
    devices: int = 1
    """Processes on each machine, one device each."""
    nodes: int = 1
    """Machines; the same command runs on each, see "Several machines" in the documentation."""
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """ddp: every process has the whole model; fsdp: weights and optimizer are spread over them; auto: ddp."""
    precision: str = "32-true"
    """Such as 32-true or bf16-mixed, as in Lightning Fabric."""
    threads: int | None = None
    """CPU threads of each process; torch's own number if unset."""
    checkpoint_seconds: float = 300.0
    """Time between checkpoints within an epoch; 0 for one after every update."""
    log_every: int = 100
    """Updates between points of the TensorBoard curves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageModelRun(Run):
    """Trains a word language model."""

    data: str = "ptb"
    """ptb, wikitext-2, python-docs (needs no download), or a folder with train.txt, valid.txt and test.txt."""
    model: LanguageModelConfig = field(default_factory=LanguageModelConfig)
    """The model."""
    bptt: int = 35
    """Words per segment: how far gradients reach back."""
    varied_bptt: bool = False
    """Draw the length of each segment around bptt, and scale the learning rate with it."""
    activation_l2: float = 0.0
    """Weight of the last layer's mean squared (dropped) output in the loss."""
    slowness: float = 0.0
    """Weight of the mean squared change of the last layer's output between steps in the loss."""
    distil: float = 0.0
    """Share of the loss that compares with the predictions of the model in `start` instead of the text, in [0, 1]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRun(Run):
    """Trains the network for MNIST."""

    data: str = "mnist"
    """mnist, or a folder with the same four files."""
    model: ImageNetworkConfig = field(default_factory=ImageNetworkConfig)
    """The model."""
    batch_size: int = 128
    """Images per update, over all devices."""
    eval_batch_size: int = 1000
    """Images at once in evaluation, over all devices."""
    valid_size: int = 5000
    """How many of the last training images are kept for validation."""


TASKS: dict[str, type[Run]] = {"language-model": LanguageModelRun, "images": ImageRun}

# A resumed run may differ in these: they say where and how it runs, not what is computed.
NOT_PART_OF_THE_RUN = ("output", "resume", "data_dir", "checkpoint_seconds", "log_every")


# The words for options of gates in the files of version 0.1.
_FORMER_WORDS = {"kind": "gate"}
_FORMER_KEY_SIZES = {"all": None}


def run_to_plain(run: Run) -> dict[str, Any]:
    """Plain data with the name of the task in it."""
    task = next(name for name, kind in TASKS.items() if type(run) is kind)
    return {"task": task} | to_plain(run)


def run_from_plain(data: dict[str, Any]) -> Run:
    """A run from plain data; what is left out keeps its default."""
    task = data.get("task") if isinstance(data, dict) else None
    if task not in TASKS:
        raise invalid("config", expected=f"a task, one of {tuple(TASKS)}", got=task, remedy='Add "task" to the file.')
    return from_plain(TASKS[task], _in_present_words({name: value for name, value in data.items() if name != "task"}))


def _in_present_words(data: dict[str, Any]) -> dict[str, Any]:
    """The plain data of a run, with all options of its gates, as GateSpec names them."""
    model = data.get("model")
    gate = model.get("gate") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(gate, dict):
        return data
    renamed = {_FORMER_WORDS.get(name, name): value for name, value in gate.items()}
    if renamed.get("normalise") is not None:
        renamed.setdefault("gate", "topk")
    if model.get("near_dense"):
        renamed["near_dense"] = True
    if isinstance(size := renamed.get("key_size"), str):
        renamed["key_size"] = _FORMER_KEY_SIZES.get(size, size)
    if isinstance(size := renamed.get("block_size"), int):
        renamed["block_size"] = [size, size]
    kept = {name: value for name, value in model.items() if name != "near_dense"}
    return data | {"model": kept | {"gate": renamed}}


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What of two runs as plain data, which older versions may have written, differs and matters."""
    return _differences(_whole(old), _whole(new), "")


def _whole(run: dict[str, Any]) -> dict[str, Any]:
    """The run with every option that it leaves out, less those of gates that it lacks; other data as they are."""
    if run.get("task") not in TASKS:
        return run
    whole = run_to_plain(run_from_plain(run))
    if whole["model"]["matrices"] == "dense":
        whole["model"].pop("gate")
        for name in ("gate_lr", "revive"):
            whole["optimizer"].pop(name)
    return whole


def _differences(old: dict[str, Any], new: dict[str, Any], at: str) -> list[str]:
    """Each as "name: old -> new"."""
    found = []
    for name in sorted(old.keys() | new.keys()):
        if not at and name in NOT_PART_OF_THE_RUN:
            continue
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, f"{at}{name}.")
        elif a != b:
            found.append(f"{at}{name}: {a!r} -> {b!r}")
    return found
