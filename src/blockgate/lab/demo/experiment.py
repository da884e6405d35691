"""The demo from beginning to end: train, count, record, pack, time. What comes out is what is shown."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from blockgate.errors import invalid, missing_extra
from blockgate.grid import as_int, check_size
from blockgate.inspect.timing import ROUNDS, Timing, using_threads
from blockgate.lab.bench import machine
from blockgate.lab.demo.arms import ARMS, TrainedArm, arm_run, train_arm
from blockgate.lab.demo.gates import Trace, distribution, trace_sentence
from blockgate.lab.demo.timing import INPUTS, Way, busy_reason, time_layers, time_models, ways_to_run
from blockgate.lab.models import count_costs
from blockgate.lab.training import record_test
from blockgate.lab.training.config import LanguageModelRun, run_to_plain
from blockgate.lab.training.logs import Lines
from blockgate.lab.training.tasks import LanguageTask
from blockgate.ops import describe_auto

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["DemoOrder", "run_demo"]

# Seconds that each way to run a model is timed for.
TIMED, TIMED_QUICK = 1.5, 0.02
LARGEST_SEED = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOrder:
    """What is asked for.

    Args:
        output: folder for the page, the numbers and the trained models.
        quick: tiny models and hardly any training, to see whether everything works.
        seed: of everything random.
        threads: of the CPU; torch's own number if None.
        command: as it was typed, for the page.
        program: how a shell calls blockgate, for the commands that the page shows.
    """

    output: Path
    quick: bool = False
    seed: int = 1
    threads: int | None = None
    command: str = "blockgate demo"
    program: str = "blockgate"

    def check(self) -> None:
        """Refuses what can't work before any time is spent."""
        if self.threads is not None:
            check_size("--threads", self.threads)
        seed = as_int(self.seed)
        if seed is None or not 0 <= seed <= LARGEST_SEED:
            raise invalid("--seed", expected=f"0 to {LARGEST_SEED}", got=self.seed, remedy="The default is 1.")
        try:
            (self.output / "runs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise invalid(
                "--output",
                expected="a folder that can be written to",
                got=f"{self.output} ({error.strerror})",
                remedy="Give another one.",
            ) from None


def run_demo(order: DemoOrder) -> tuple[dict[str, Any], Trace]:
    """Trains and measures, with progress on stderr; returns the numbers, ready for JSON, and gates along a sentence."""
    try:
        from rich.console import Console
    except ImportError as error:
        raise missing_extra("the demo", error) from None
    order.check()
    began = time.perf_counter()
    with using_threads(order.threads):
        return _run(order, Console(stderr=True), began)


def _run(order: DemoOrder, console: Console, began: float) -> tuple[dict[str, Any], Trace]:
    threads = torch.get_num_threads()
    about = {**machine.describe(), "backend": describe_auto()}
    arms = []
    expected = "half a minute" if order.quick else "3 to 4 minutes on two idle CPU cores, more if others use them"
    console.print(f"This takes about {expected}.", highlight=False, soft_wrap=True)
    for number, arm in enumerate(ARMS):
        console.print(f"[bold]{number + 1}/{len(ARMS) + 1} training: {arm.label}[/bold]", highlight=False)
        folder = order.output / "runs" / arm.name
        run = arm_run(arm, output=folder, seed=order.seed, threads=threads, quick=order.quick)
        arms.append(train_arm(arm, run, notes=about | {"command": order.command}))
    console.print(f"[bold]{len(ARMS) + 1}/{len(ARMS) + 1} packing and timing[/bold]", highlight=False)
    trained_run = arms[0].trained.run
    assert isinstance(trained_run, LanguageModelRun)
    task = LanguageTask(trained_run, vocabulary=arms[0].trained.vocabulary)
    inputs = task.single_inputs("test", INPUTS)
    counted = [_count(one) for one in arms]
    with torch.no_grad():
        ways, left_out = ways_to_run(arms, inputs)
        perplexities = _perplexities(ways, task)
        seconds = TIMED_QUICK if order.quick else TIMED
        others = machine.Others()
        with _bar(console, "timing models") as progress:
            timed = time_models(ways, inputs, seconds=seconds, progress=progress)
        with _bar(console, "timing layers") as progress:
            layers, of_layers = time_layers(ways, arms[-1], inputs, seconds=seconds / 2, progress=progress)
        compared = [timed.timings[way.name] for way in ways if not way.rival or way.name == timed.best_rival]
        busy = busy_reason(others.cores, threads, compared + of_layers)
        about["used by other processes"] = str(others)
        trace = trace_sentence(arms[-1].arm.label, arms[-1].trained, task.corpus)
    macs = {one["name"]: one["macs"] for one in counted}
    numbers = {
        "command": order.command,
        "program": order.program,
        "quick": order.quick,
        "seed": order.seed,
        "threads": threads,
        "seconds": round(time.perf_counter() - began, 1),
        "machine": about,
        "corpus": task.corpus.statistics() | {"vocabulary": len(task.corpus.vocabulary)},
        "run": run_to_plain(arms[-1].trained.run),
        "arms": counted,
        "fastest_dense": timed.best_rival,
        "busy": busy,
        "speeds": [
            {
                "model": way.arm.name,
                "label": way.arm.label,
                "engine": way.engine,
                "test_perplexity": perplexities[way.name],
                "macs": macs[way.arm.name],
                **_times(timed.timings[way.name]),
                "speedup": timed.speedup(way.name),
            }
            for way in ways
        ],
        "layers": layers,
        "left_out": left_out,
    }
    return numbers, trace


def _count(one: TrainedArm) -> dict[str, Any]:
    """Facts about a trained arm: costs with measured densities, results, gates, curve."""
    gates, densities = {}, {}
    if one.arm.sparsity is not None:
        record = record_test(one.trained)
        gates = distribution(record)
        densities = {name: gate.measured_density or 0.0 for name, gate in record.gates.items()}
    costs = count_costs(one.trained.model, densities)
    return {
        "name": one.arm.name,
        "label": one.arm.label,
        "sparsity": one.arm.sparsity,
        "density": (costs.matrix_macs - costs.gate_macs) / costs.matrix_macs_dense,
        **{name: value for name, value in asdict(costs).items() if name != "zeros"},
        "best_epoch": one.results["epoch"],
        "valid_perplexity": one.results["valid"]["perplexity"],
        "test_perplexity": one.results["test"]["perplexity"],
        "gates": gates,
        "curve": one.curve,
    }


def _perplexities(ways: list[Way], task: LanguageTask) -> dict[str, float | None]:
    """Of exactly the models that are timed; None for engines that read single words only."""
    return {
        way.name: None
        if way.model is None
        else task.metrics(task.evaluate(way.model, "test", torch.device("cpu")))["perplexity"]
        for way in ways
    }


def _times(timing: Timing) -> dict[str, Any]:
    return {
        "seconds": timing.median,
        "p10": timing.p10,
        "p90": timing.p90,
        "rounds": timing.rounds,
        "tokens_per_second": 1 / timing.median,
    }


@contextmanager
def _bar(console: Console, title: str) -> Iterator[Any]:
    """A progress bar for the rounds of a comparison, or lines where none can be drawn; gives what moves it."""
    from rich.progress import Progress

    lines = Lines(f"{title}, rounds", ROUNDS, say=lambda text: console.print(text, highlight=False, soft_wrap=True))
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=ROUNDS)

        def advance() -> None:
            bar.advance(task)
            if not console.is_terminal:
                lines.update(int(bar.tasks[0].completed))

        yield advance
