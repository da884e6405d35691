"""`blockgate bench`: what the layers save on this machine, measured side by side with torch."""

from __future__ import annotations

import itertools
import json
import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import torch
import tyro
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress, TaskID

from blockgate.errors import invalid
from blockgate.grid import check_size, check_sparsity, check_threads
from blockgate.lab.bench import machine, report
from blockgate.lab.bench.comparison import ComparisonResult, comparison_markdown, run_comparison
from blockgate.lab.bench.linear import LinearCase, LinearResult, run_linear
from blockgate.lab.bench.recurrent_targets import LSTM_COMPARISONS, QRNN_COMPARISONS, Planned
from blockgate.lab.bench.targets import TARGETS, TargetResult, run_target
from blockgate.lab.bench.training import TrainingResult, run_training

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Bench"]

Choice = TypeVar("Choice")

TITLES = {
    "targets": "Speed targets",
    "linear": "Linear layers",
    "lstm": "LSTM layers and language models",
    "qrnn": "Quasi-RNN layers",
}
RIVALS = {
    "targets": "`nn.Linear` in float32",
    "linear": "`nn.Linear` in float32",
    "lstm": "the fastest rival of each table",
    "qrnn": "a dense QRNN of `nn.Linear` filters with our native pooling",
}
DEFAULT_SHAPES = ("6144x1536", "4608x3072", "1024x1024", "10000x1536", "4096x4096")
MOST_WEIGHTS = 1 << 28
DEFAULT_BATCHES = (1, 4, 16, 64, 256, 1024)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Times blockgate against torch on this machine, side by side, gate included.

    `targets` measures the lines of the README's speed table against their floors (about 5 minutes). `linear` compares
    a layer with dense torch, torch's sparse formats and torch's int8. `lstm` and `qrnn` compare recurrent layers and
    whole language models, in decoding and in training, with torch's fastest way and with other engines that are
    installed (pip install 'blockgate[bench]'). Let nothing else run meanwhile.

    For example:
        blockgate bench targets
        blockgate bench linear --shapes 1024x1024 --batches 1 16
        blockgate bench linear --training --shapes 6144x1536 --batches 512
        blockgate bench lstm --only decode
    """

    what: Annotated[Literal["targets", "linear", "lstm", "qrnn"], tyro.conf.Positional] = "targets"
    """The table of promises, a layer of your choice, or recurrent networks."""
    shapes: tuple[str, ...] = DEFAULT_SHAPES
    """Layers as OUTxIN features."""
    batches: tuple[int, ...] = DEFAULT_BATCHES
    """Rows of input."""
    sparsities: tuple[float, ...] = (0.0, 0.5, 0.75, 0.9)
    """Shares of closed blocks."""
    block: int = 128
    """Block size."""
    key: int = 128
    """Input features that the gate reads."""
    select: Literal["global", "per_row"] = "global"
    """How the gate chooses."""
    threads: int | None = None
    """Threads; torch's own number if unset."""
    cold: bool = False
    """Evict the cache before every timed call."""
    training: bool = False
    """Time forward and backward, and measure peak memory, instead of inference."""
    static: bool = True
    """Also time torch's CSR and BSR at the same sparsities, and its int8."""
    seconds: float = 1.0
    """Time to spend on each arm."""
    only: str = ""
    """With `targets`, `lstm` and `qrnn`: only what has this text in its title."""
    output: Path | None = None
    """Where to write the report: PATH.md, PATH.json and, for `linear`, PATH.png. Unset: print only."""
    json: bool = False
    """Print JSON, for machines."""

    def run(self) -> None:
        """Measures, prints, and writes the report if asked."""
        self._check()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        console = Console(stderr=True)
        roofs = {"read_bytes_per_second": machine.read_bandwidth(64 << 20), "flops": machine.peak_flops()}
        described = machine.describe()
        with Progress(console=console, transient=True) as progress:
            results, markdown = self._measure(progress)
        command = shlex.join(["blockgate", *sys.argv[1:]])
        text = report.head(TITLES[self.what], described, roofs, command, RIVALS[self.what]) + markdown
        data: dict[str, Any] = {
            "command": command,
            "machine": described,
            "roofs": roofs,
            "results": [result.to_dict() for result in results],
        }
        if self.json:
            print(json.dumps(data, indent=1))
        else:
            Console().print(Markdown(text))
        if self.output is not None:
            written = report.write_report(self.output, text, data)
            linear = [result for result in results if isinstance(result, LinearResult)]
            if linear:
                written.append(self.output.with_name(self.output.name + ".png"))
                report.plot_speedups(linear, written[-1])
            console.print("wrote " + ", ".join(map(str, written)))

    def _check(self) -> None:
        """Refuses what can't be measured before any time is spent."""
        if self.threads is not None:
            check_threads("--threads", self.threads)
        if not self.batches or any(batch < 1 for batch in self.batches):
            raise invalid("--batches", expected="numbers from 1", got=self.batches, remedy="Try --batches 1 16.")
        if not self.sparsities:
            raise invalid("--sparsities", expected="at least one", got=self.sparsities, remedy="Try --sparsities 0.9.")
        for sparsity in self.sparsities:
            check_sparsity(sparsity, "--sparsities")
        if not 0 < self.seconds < math.inf:
            raise invalid("--seconds", expected="a positive number", got=self.seconds, remedy="Try --seconds 1.")
        for name, size in {"--block": self.block, "--key": self.key}.items():
            check_size(name, size)
        if not self.shapes:
            raise invalid("--shapes", expected="at least one", got=self.shapes, remedy="Try --shapes 1024x1024.")
        for out_features, in_features in map(parse_shape, self.shapes):
            if out_features * in_features > MOST_WEIGHTS:
                raise invalid(
                    "--shapes",
                    expected=f"layers of at most {MOST_WEIGHTS} weights",
                    got=f"{out_features}x{in_features}",
                    remedy="Several copies must fit in memory.",
                )
        if self.what != "linear":
            self._chosen({title: title for title in self._titles()})
        if self.output is not None and self.what == "linear" and not self.training:
            report.require_matplotlib()

    def _measure(self, progress: Progress) -> tuple[Sequence[Any], str]:
        """Results, each with a `to_dict`, and their tables."""
        if self.what == "targets":
            return self._targets(progress)
        if self.what == "linear":
            return self._linear(progress)
        return self._recurrent(progress, LSTM_COMPARISONS if self.what == "lstm" else QRNN_COMPARISONS)

    def _targets(self, progress: Progress) -> tuple[list[TargetResult], str]:
        targets = self._chosen({target.work: target for target in TARGETS})
        results = []
        bar = progress.add_task("targets", total=len(targets))
        for target in targets:
            progress.update(bar, description=target.work)
            results.append(run_target(target, seconds=self.seconds))
            progress.advance(bar)
        return results, report.targets_markdown(results)

    def _recurrent(self, progress: Progress, planned: Sequence[Planned]) -> tuple[list[ComparisonResult], str]:
        chosen = self._chosen({plan.title: plan for plan in planned})
        results = []
        bar = progress.add_task(self.what, total=len(chosen))
        for plan in chosen:
            progress.update(bar, description=plan.title)
            results.append(run_comparison(plan.build(), seconds=self.seconds, cold=plan.cold))
            progress.advance(bar)
        return results, "".join(map(comparison_markdown, results))

    def _titles(self) -> list[str]:
        """Of everything that could be measured."""
        if self.what == "targets":
            return [target.work for target in TARGETS]
        return [plan.title for plan in (LSTM_COMPARISONS if self.what == "lstm" else QRNN_COMPARISONS)]

    def _chosen(self, by_title: dict[str, Choice]) -> list[Choice]:
        """Those whose title contains what --only says."""
        chosen = [item for title, item in by_title.items() if self.only in title]
        if not chosen:
            titles = list(by_title)
            raise invalid(
                "--only", expected=f"a part of one of {titles}", got=self.only, remedy="Leave it out for all."
            )
        return chosen

    def _linear(self, progress: Progress) -> tuple[list[LinearResult] | list[TrainingResult], str]:
        cases = [
            LinearCase(
                out_features=out_features,
                in_features=in_features,
                batch=batch,
                block=self.block,
                key=self.key,
                sparsities=self.sparsities,
                select=self.select,
                static=self.static,
                cold=self.cold,
            )
            for (out_features, in_features), batch in itertools.product(map(parse_shape, self.shapes), self.batches)
        ]
        bar = progress.add_task("layers", total=8 * len(cases))
        advance = _advance(progress, bar)
        if self.training:
            trained = []
            for case in cases:
                progress.update(bar, description=f"training {case.title}")
                trained.append(run_training(case, seconds=self.seconds, progress=advance))
            return trained, "".join(map(report.training_markdown, trained))
        results = []
        for case in cases:
            progress.update(bar, description=case.title)
            results.append(run_linear(case, seconds=self.seconds, progress=advance))
        return results, "".join(map(report.linear_markdown, results))


def parse_shape(text: str) -> tuple[int, int]:
    """(out, in) from "OUTxIN"."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise invalid("--shapes", expected="OUTxIN such as 6144x1536", got=text, remedy="Give positive sizes.")
    return int(parts[0]), int(parts[1])


def _advance(progress: Progress, bar: TaskID) -> Callable[[], None]:
    return lambda: progress.advance(bar)
