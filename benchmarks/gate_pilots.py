"""Remedies for frozen gates that were tried and left out of the library, each as a patch of the margin gate.

    python benchmarks/gate_pilots.py floor-10 --task ptb-qrnn --percent 90 --seed 1 --limits 184 150

trains the arm `margin` of `blockgate reproduce gates` with the remedy, stops if it is clearly behind after an epoch,
and writes what it was, its config, the machine and the curve into benchmarks/study/pilots/gates.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockgate.gates.margin import MarginGate
from blockgate.inspect.table import markdown_table, to_percent
from blockgate.lab.bench import machine
from blockgate.lab.reproduce.arms import NO_DROPOUT, Arm, run_of
from blockgate.lab.reproduce.results import measure
from blockgate.lab.training import Hook, loop, shipped_configs, train
from blockgate.lab.training.config import RampConfig, run_to_plain

STUDY = Path(__file__).parent / "study" / "laptop"
RESULTS = STUDY.parent / "pilots" / "gates"

# Rows of a batch on which the use of blocks is counted, and how far the running share moves towards theirs.
ROWS, MOMENTUM = 64, 0.02

# Noise is gone after this share of the updates; gates have their final sparsity after half of them.
NOISE_ENDS = 2 / 3


class FloorHook(Hook):
    """Raises the bias of every block that is used less than a floor; in the place of `ReviveHook`.

    Args:
        model: with margin gates.
        optimizer: whose last group holds the gates: steps fall with its learning rate.
        rate: size of the steps, as a share of that rate.
        floor: as a share of the density.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, rate: float, *, floor: float) -> None:
        self.optimizer, self.rate, self.floor = optimizer, rate, floor
        self.gates = [module for module in model.modules() if isinstance(module, MarginGate)]
        self.use: dict[MarginGate, Tensor] = {}
        for gate in self.gates:
            gate.observe = partial(self._observe, gate, gate.observe)  # type: ignore[method-assign]

    @torch.no_grad()
    def _observe(self, gate: MarginGate, before: Callable[[Tensor], None], x: Tensor) -> None:
        before(x)
        some = x[:: max(1, len(x) // ROWS)].contiguous()
        _, indices = gate(some)
        share = torch.bincount(indices.flatten(), minlength=gate.grid.num_blocks) / len(some)
        self.use[gate] = torch.lerp(self.use.get(gate, share), share, MOMENTUM)

    @torch.no_grad()
    def after_update(self) -> None:
        """One step."""
        step = self.rate * self.optimizer.param_groups[-1]["lr"]
        for gate, use in self.use.items():
            gate.bias.add_((use < self.floor * gate.target_density).to(gate.bias.dtype), alpha=step)


class Noise(Hook):
    """Adds noise to the scores in training, less and less.

    Args:
        model: with margin gates.
        updates: of an epoch.
        epochs: of the run.
        size: of the noise at first, as a share of the spread of a row's scores.
    """

    def __init__(self, model: nn.Module, updates: int, *, epochs: int, size: float) -> None:
        self.size, self.done, self.end = size, 0, NOISE_ENDS * epochs * updates
        for gate in model.modules():
            if isinstance(gate, MarginGate):
                gate.scores = partial(self._scores, gate, gate.scores)  # type: ignore[method-assign]

    def _scores(self, gate: MarginGate, exact: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        scores = exact(x)
        left = self.size * max(0.0, 1 - self.done / self.end)
        if not (gate.training and torch.is_grad_enabled() and left):
            return scores
        spread = scores.detach().view(len(x), gate.groups, -1).std(-1, keepdim=True)
        noise = torch.randn_like(scores).view(len(x), gate.groups, -1) * spread * left
        return scores + noise.view_as(scores)

    def after_update(self) -> None:
        """One step."""
        self.done += 1


def spread_keys() -> None:
    """Lets every margin gate read features spread over its input instead of the first."""
    made = MarginGate.__init__

    def make(gate: MarginGate, *args: Any, **options: Any) -> None:
        made(gate, *args, **options)
        features = torch.arange(gate.key_size) * gate.grid.in_features // gate.key_size
        # An attribute of the object: so native code knows that it can't stand in.
        gate.key_of = lambda x: x[:, features]  # type: ignore[method-assign]

    MarginGate.__init__ = make  # type: ignore[method-assign, assignment]


@dataclass(frozen=True)
class Pilot:
    """A remedy.

    Attributes:
        about: what is different from the arm `margin`.
        change: of its run.
        floor: of use, see FloorHook.
        noise: size, see Noise.
        spread: whether keys are spread over the input.
    """

    about: str
    change: Callable[[Any], Any] = lambda run: run
    floor: float | None = None
    noise: float = 0.0
    spread: bool = False


def _with_gate(run: Any, **options: Any) -> Any:
    return replace(run, model=replace(run.model, gate=replace(run.model.gate, **options)))


PILOTS = {
    "plain": Pilot("the default"),
    "floor-10": Pilot("bias nudged up while a block is used for less than a tenth of the density", floor=0.1),
    "floor-50": Pilot("bias nudged up while a block is used for less than half of the density", floor=0.5),
    "noise": Pilot("noise on scores, at first half of their spread, none after two thirds of the updates", noise=0.5),
    "spread": Pilot("the key is spread over the input", spread=True),
    "key-all": Pilot("the gate reads its whole input", partial(_with_gate, key_size=None)),
    "low-rank": Pilot(
        "the gate reads its whole input through 16 hidden units, as that of the LSTM does",
        partial(_with_gate, key_size=None, gate_hidden=16),
    ),
    "ramp-early": Pilot(
        "the ramp ends after half an epoch", lambda run: replace(run, ramp=RampConfig(end=0.5, every="update"))
    ),
    "ramp-waits": Pilot(
        "the ramp begins after half an epoch and ends after two",
        lambda run: replace(run, ramp=RampConfig(begin=0.5, end=2.0, every="update")),
    ),
}


class _Enough(Exception):  # noqa: N818
    """The epochs that were asked for are over."""


class _Stop(Hook):
    """Ends a run that is clearly behind: each epoch has a limit, the validation perplexity it must stay below."""

    def __init__(self, limits: Sequence[float]) -> None:
        self.limits, self.behind = list(limits), False

    def after_epoch(self, score: float) -> None:
        self.behind = bool(self.limits) and score > self.limits.pop(0)

    def after_update(self) -> None:
        # Not sooner: the epoch is written down after `after_epoch`.
        if self.behind:
            raise _Enough


def run_pilot(name: str, task: str, percent: int, seed: int, limits: Sequence[float], folder: Path) -> dict[str, Any]:
    """Trains a pilot in a folder, and returns what is kept of it."""
    pilot = PILOTS[name]
    base = replace(shipped_configs()[f"{task}-laptop"], accelerator="cpu", threads=1, seed=seed, output=folder)
    run = pilot.change(run_of(Arm(task, f"margin{NO_DROPOUT}", percent), base))
    torch.set_num_threads(1)
    hooks: list[Callable[[nn.Module, int], Hook]] = []
    if pilot.floor is not None:
        setattr(loop, "ReviveHook", partial(FloorHook, floor=pilot.floor))  # noqa: B010
    if pilot.noise:
        hooks.append(lambda model, updates: Noise(model, updates, epochs=run.epochs, size=pilot.noise))
    if pilot.spread:
        spread_keys()
    hooks.append(lambda model, updates: _Stop(limits))  # noqa: ARG005
    results: dict[str, Any] = {}
    with contextlib.suppress(_Enough):
        results = train(run, hooks=hooks, quiet=True) | measure(folder)
    rows = csv.DictReader((folder / "epochs.csv").read_text().splitlines())
    epochs = [{name: float(value) for name, value in row.items() if value} for row in rows]
    about = f"{pilot.about}; {task}, {percent}%, seed {seed}"
    if len(epochs) < run.epochs:
        about += f"; stopped after {len(epochs)} of {run.epochs} epochs"
    plain = run_to_plain(run) | {"output": f"runs/pilots/{folder.name}"}
    return {"about": about, "pilot": name, "run": plain, "machine": machine.describe(), **results, "epochs": epochs}


def table(results: Path) -> str:
    """Markdown: what came of all pilots of these files, each task and sparsity beside the default of the same seed."""
    pilots = [json.loads(file.read_text()) for file in sorted(results.glob("*.json"))]
    rows = []
    for pilot in (pilot for pilot in pilots if "pilot" in pilot):
        run = pilot["run"]
        task, percent = f"ptb-{run['model']['cell']}", round(100 * run["model"]["gate"]["sparsity"])
        default = STUDY / f"{task}-margin{NO_DROPOUT}-{percent}" / f"seed-{run['seed']}.json"
        if default.is_file():
            rows.append(_row(task, percent, "the default", json.loads(default.read_text())))
        rows.append(_row(task, percent, PILOTS[pilot["pilot"]].about, pilot))
    head = ["task", "sparsity", "seed", "gate", "valid, epoch 1", "2", "3", "test", "input-dependent", "dead"]
    # A default with several pilots is one row.
    shown = sorted({tuple(row): row for row in rows}.values(), key=_order)
    return "# Remedies that were tried\n\n" + markdown_table(head, shown)


def _row(task: str, percent: int, name: str, result: dict[str, Any]) -> list[str]:
    epochs = result["epochs"]
    curve = [f"{row['valid_perplexity']:.1f}" for row in epochs]
    test = f"{result['test']['perplexity']:.2f}" if "test" in result else "stopped"
    shares = [to_percent(epochs[-1][fact]) for fact in ("input_dependent", "dead_blocks")]
    seed = str(result["run"]["seed"])
    return [task, f"{percent}%", seed, name, *(curve + ["-"] * 3)[:3], test, *shares]


def _order(row: list[str]) -> tuple[Any, ...]:
    """By task, sparsity and seed; the default comes first."""
    return (row[0] != "ptb-qrnn", -int(row[1].rstrip("%")), row[2], row[3] != "the default", row[3])


def main() -> None:
    """Trains one pilot and keeps its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pilot", choices=[*PILOTS, "table"], help="`table` writes table.md of all results")
    parser.add_argument("--task", default="ptb-qrnn")
    parser.add_argument("--percent", type=int, default=90)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--limits", type=float, nargs="*", default=(), help="stop after an epoch whose validation perplexity is higher"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    given.results.mkdir(parents=True, exist_ok=True)
    if given.pilot == "table":
        (given.results / "table.md").write_text(table(given.results))
        return
    name = f"{given.task}-{given.pilot}-{given.percent}-seed-{given.seed}"
    with tempfile.TemporaryDirectory() as folder:
        result = run_pilot(given.pilot, given.task, given.percent, given.seed, given.limits, Path(folder) / name)
    (given.results / f"{name}.json").write_text(json.dumps(result) + "\n")
    print(result["about"])
    for row in result["epochs"]:
        shown = ("epoch", "valid_perplexity", "input_dependent", "dead_blocks")
        print("  ".join(f"{fact} {row[fact]:.4g}" for fact in shown))
    if "test" in result:
        print(f"test perplexity {result['test']['perplexity']:.2f}")


if __name__ == "__main__":
    main()
