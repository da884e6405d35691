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
from rich.progress import Progress, TaskID

from blockgate.cli.output import print_markdown
from blockgate.cli.sizes import parse_block, parse_shape
from blockgate.errors import invalid
from blockgate.grid import check_size, check_sparsity, check_threads
from blockgate.lab.bench import machine, report
from blockgate.lab.bench.comparison import ComparisonResult, comparison_markdown, run_comparison
from blockgate.lab.bench.contract import CHECKS, Outcome, contract_markdown, run_check
from blockgate.lab.bench.gpu import gpu_markdown, run_on
from blockgate.lab.bench.gpu_recurrent import GPU_WORK
from blockgate.lab.bench.linear import LinearCase, LinearResult, run_linear
from blockgate.lab.bench.recurrent_targets import RECURRENT_COMPARISONS, Planned
from blockgate.lab.bench.targets import TARGETS, TargetResult, run_target
from blockgate.lab.bench.training import run_training

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Bench"]

Choice = TypeVar("Choice")

TITLES = {
    "targets": "Speed targets",
    "linear": "Linear layers",
    "lstm": "LSTM layers and language models",
    "gru": "GRU layers",
    "qrnn": "Quasi-RNN layers",
    "contract": "Slower than torch, or not",
}
RIVALS = {
    "targets": "`nn.Linear` in float32",
    "linear": "`nn.Linear` in float32",
    "lstm": "the fastest rival of each table",
    "gru": "the fastest rival of each table",
    "qrnn": "a dense QRNN of `nn.Linear` filters with our native pooling",
    "contract": "what each row is held against",
}
DEFAULT_SHAPES = ("6144x1536", "4608x3072", "1024x1024", "10000x1536", "4096x4096")
MOST_WEIGHTS = 1 << 28
DEFAULT_BATCHES = (1, 4, 16, 64, 256, 1024)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Times blockgate against torch on this machine, side by side, gate included.

    `targets` measures single layers against the floors that we promise (about 5 minutes). `linear` compares
    a layer with dense torch, torch's sparse formats and torch's int8. `lstm`, `gru` and `qrnn` compare recurrent layers
    and whole language models, in decoding and in training, with torch's fastest way and with other engines that are
    installed (pip install 'blockgate[bench]'). `contract` looks for layers that are slower than torch's, for advice
    that doesn't pay, and for slow calls beside busy processes, which it starts itself. Let nothing else run meanwhile.

    For example:
        blockgate bench targets
        blockgate bench linear --shapes 1024x1024 --batches 1 16
        blockgate bench linear --training --shapes 6144x1536 --batches 512
        blockgate bench lstm --only decode
        blockgate bench contract --only crowded
        blockgate bench linear --device cuda --shapes 6144x1536 --batches 1 512
        blockgate bench lstm --device cuda
    """

    what: Annotated[Literal["targets", "linear", "lstm", "gru", "qrnn", "contract"], tyro.conf.Positional] = "targets"
    """What to time; see above."""
    shapes: tuple[str, ...] = DEFAULT_SHAPES
    """Layers as OUTxIN features."""
    batches: tuple[int, ...] = DEFAULT_BATCHES
    """Rows of input."""
    sparsities: tuple[float, ...] = (0.0, 0.5, 0.75, 0.9)
    """Shares of closed blocks."""
    block: tuple[str, ...] = ("256x16",)
    """Block sizes: a number, or OUTxIN."""
    key: int = 128
    """Input features that the gate reads."""
    gate: Literal["topk", "margin"] = "margin"
    """The kind of gate."""
    select: Literal["global", "per_row"] = "per_row"
    """How the gate chooses."""
    device: Literal["cpu", "cuda"] = "cpu"
    """"cuda" times all but `contract` on the GPU, in float32 and bfloat16, against torch's own."""
    threads: int | None = None
    """Threads. Default: torch's own number."""
    cold: bool = False
    """Evict the cache before every timed call."""
    training: bool = False
    """Time forward and backward, and measure peak memory, instead of inference."""
    memory: bool = True
    """Whether training measures peak memory, in a process of its own for each arm."""
    cpu_time: bool = False
    """With `--training --threads 1`: count processor time, which what else runs on the machine changes little."""
    static: bool = True
    """Also time torch's CSR and BSR at the same sparsities, and its int8."""
    seconds: float = 1.0
    """Time to spend on each arm."""
    only: str = ""
    """With all but `linear`: only what has this text in its title. Those of `contract` begin with dense, gated or
    crowded."""
    output: Path | None = None
    """Where to write the report: PATH.md, PATH.json and, for `linear`, PATH.png. Unset: print only."""
    json: bool = False
    """Print JSON, for scripts."""

    def run(self) -> None:
        """Measures, prints, and writes the report if asked."""
        self._check()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        console = Console(stderr=True)
        others = machine.Others()
        roofs = {"read_bytes_per_second": machine.read_bandwidth(64 << 20), "flops": machine.peak_flops()}
        described = machine.describe()
        with Progress(console=console, transient=True) as progress:
            results, markdown = self._measure(progress)
        described["used by other processes"] = str(others)
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
            print_markdown(text)
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
        check_size("--key", self.key)
        if self.cpu_time and not (self.training and self.threads == 1):
            raise invalid(
                "--cpu-time",
                expected="--training --threads 1 beside it",
                got=f"--threads {self.threads}",
                remedy="Processor time is that of one thread.",
            )
        if not self.block:
            raise invalid("--block", expected="at least one", got=self.block, remedy="Try --block 128 256x16.")
        for block in self.block:
            parse_block(block)
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
        if self.device == "cuda":
            self._check_gpu()
        if self.what != "linear":
            self._chosen({title: title for title in self._titles()})
        if self.output is not None and self.what == "linear" and not self.training:
            report.require_matplotlib()

    def _check_gpu(self) -> None:
        if self.what not in {"linear", *GPU_WORK}:
            expected = f"linear, {', '.join(GPU_WORK)}"
            raise invalid("--device cuda", expected=expected, got=self.what, remedy="The others are of the CPU.")
        if not torch.cuda.is_available():
            remedy = "Install a torch that was built for it, or leave --device out."
            raise invalid("--device cuda", expected="a GPU that torch can use", got="none", remedy=remedy)

    def _measure(self, progress: Progress) -> tuple[Sequence[Any], str]:
        """Results, each with a `to_dict`, and their tables."""
        if self.device == "cuda" and self.what != "linear":
            return self._on_gpu(progress)
        if self.what == "targets":
            return self._targets(progress)
        if self.what == "linear":
            return self._linear(progress)
        if self.what == "contract":
            return self._contract(progress)
        return self._recurrent(progress, RECURRENT_COMPARISONS[self.what])

    def _on_gpu(self, progress: Progress) -> tuple[Sequence[Any], str]:
        chosen, results = [title for title in GPU_WORK[self.what] if self.only in title], []
        bar = progress.add_task(self.what, total=len(chosen))
        for title in chosen:
            progress.update(bar, description=title)
            results.append(GPU_WORK[self.what][title](device=self.device, seconds=self.seconds))
            progress.advance(bar)
        return results, "".join(map(gpu_markdown, results))

    def _targets(self, progress: Progress) -> tuple[list[TargetResult], str]:
        targets = self._chosen({target.work: target for target in TARGETS})
        results = []
        bar = progress.add_task("targets", total=len(targets))
        for target in targets:
            progress.update(bar, description=target.work)
            results.append(run_target(target, seconds=self.seconds))
            progress.advance(bar)
        return results, report.targets_markdown(results)

    def _contract(self, progress: Progress) -> tuple[list[Outcome], str]:
        checks = self._chosen({check.title: check for check in CHECKS})
        outcomes: list[Outcome] = []
        bar = progress.add_task("contract", total=len(checks))
        for check in checks:
            progress.update(bar, description=check.title)
            outcomes += run_check(check, seconds=self.seconds / 5)
            progress.advance(bar)
        return outcomes, contract_markdown(outcomes)

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
        if self.device == "cuda":
            return list(GPU_WORK[self.what])
        if self.what == "targets":
            return [target.work for target in TARGETS]
        if self.what == "contract":
            return [check.title for check in CHECKS]
        return [plan.title for plan in RECURRENT_COMPARISONS[self.what]]

    def _chosen(self, by_title: dict[str, Choice]) -> list[Choice]:
        """Those whose title contains what --only says."""
        chosen = [item for title, item in by_title.items() if self.only in title]
        if not chosen:
            titles = list(by_title)
            raise invalid(
                "--only", expected=f"a part of one of {titles}", got=self.only, remedy="Leave it out for all."
            )
        return chosen

    def _linear(self, progress: Progress) -> tuple[Sequence[Any], str]:
        cases = [
            LinearCase(
                out_features=out_features,
                in_features=in_features,
                batch=batch,
                block=block,
                key=self.key,
                gate=self.gate,
                sparsities=self.sparsities,
                select=self.select,
                static=self.static,
                cold=self.cold,
                cpu_time=self.cpu_time,
            )
            for (out_features, in_features), batch, block in itertools.product(
                map(parse_shape, self.shapes), self.batches, map(parse_block, self.block)
            )
        ]
        if self.device == "cuda":
            compared = []
            bar = progress.add_task("layers", total=len(cases))
            for case in cases:
                progress.update(bar, description=case.title)
                compared.append(run_on(case, self.device, training=self.training, seconds=self.seconds))
                progress.advance(bar)
            return compared, "".join(map(gpu_markdown, compared))
        bar = progress.add_task("layers", total=8 * len(cases))
        advance = _advance(progress, bar)
        if self.training:
            trained = []
            for case in cases:
                progress.update(bar, description=f"training {case.title}")
                trained.append(run_training(case, seconds=self.seconds, memory=self.memory, progress=advance))
            return trained, "".join(map(report.training_markdown, trained))
        results = []
        for case in cases:
            progress.update(bar, description=case.title)
            results.append(run_linear(case, seconds=self.seconds, progress=advance))
        return results, "".join(map(report.linear_markdown, results))


def _advance(progress: Progress, bar: TaskID) -> Callable[[], None]:
    return lambda: progress.advance(bar)
