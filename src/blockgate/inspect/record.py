"""`record_gates`: statistics of every gate decision of a model, over any number of batches."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockgate.errors import invalid
from blockgate.find import named_gates
from blockgate.grid import as_int
from blockgate.inspect.atlas import write_atlas
from blockgate.inspect.findings import Finding, judge
from blockgate.inspect.hooks import watch
from blockgate.inspect.statistics import GateStatistics, Overlap, Shares, select_gates
from blockgate.inspect.together import from_all, require_processes

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from typing_extensions import Self

    from blockgate.gates import Gate

__all__ = ["GateRecord", "record_gates"]

# Grids of more blocks count pairs of blocks only when asked: 1024 blocks take 8 MiB a gate.
MOST_PAIRED_BLOCKS = 1024

WHOLE_NUMBERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def record_gates(model: nn.Module, *, coactivation: bool | None = None, trace: int = 0) -> GateRecord:
    """Records every gate decision of `model` inside a `with` block, as sums: memory doesn't grow with the batches.

    Args:
        model: any module with gated layers, packed or not, in training or eval mode.
        coactivation: whether to count which blocks open together (num_blocks^2 numbers for each gate). None: for
            grids of up to 1024 blocks.
        trace: how many of the last rows to keep whole, for pictures of gates over a sentence.

    Returns:
        The record. It may be entered again to add to it.
    """
    rows = as_int(trace)
    if rows is None or rows < 0:
        raise invalid("trace", expected="a number of rows, 0 or more", got=trace, remedy="0 keeps none.")
    return GateRecord(named_gates(model), coactivation=coactivation, trace=rows)


class GateRecord:
    """What the gates of a model decided while it was open; see `record_gates`.

    Attributes:
        gates: the statistics of each gate, by the name of its layer.
    """

    def __init__(self, gates: dict[str, Gate], *, coactivation: bool | None, trace: int) -> None:
        self._watched = gates
        self._hooks = ExitStack()
        self._depth = 0
        self._labels: _Labels | None = None
        self.gates = {
            name: GateStatistics(
                gate.grid,
                coactivation=gate.grid.num_blocks <= MOST_PAIRED_BLOCKS if coactivation is None else coactivation,
                trace=trace,
            )
            for name, gate in gates.items()
        }

    def __enter__(self) -> Self:
        if self._depth == 0:
            self._hooks.enter_context(watch(self._watched, self._see))
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._hooks.close()

    @contextmanager
    def labelled(self, labels: Tensor | Sequence[int]) -> Iterator[None]:
        """Counts the rows of this block under their classes too.

        Args:
            labels: one whole number for each row that a gate sees, in that order. A gate that is called several times
                (a recurrent matrix, once a step) takes them in turn, and starts again at the end.
        """
        before, self._labels = self._labels, _Labels(labels)
        try:
            yield
            self._labels.check_used_up()
        finally:
            self._labels = before

    def gather(self) -> None:
        """Adds up what all processes have recorded: then each has the record of the whole batch.

        For data-parallel runs: call it once, after the block and in every process. Kept traces are those of the
        first process, then of the second, and so on.
        """
        require_processes("gather")
        for name, gate in self.gates.items():
            first, *others = from_all(gate)
            for other in others:
                first.merge(other)
            self.gates[name] = first

    def distribution(self, threshold: float = 0.95) -> dict[str, Shares]:
        """Shares of blocks that are always on, input dependent and always off, for each gate that saw rows.

        Args:
            threshold: a block is always on if at least this share of rows opens it, always off if at least this share
                leaves it closed. In (0.5, 1].
        """
        if not isinstance(threshold, (int, float)) or not 0.5 < threshold <= 1:
            raise invalid("threshold", expected="a number in (0.5, 1]", got=threshold, remedy="The paper uses 0.95.")
        return {name: gate.shares(threshold) for name, gate in self.gates.items() if gate.rows}

    def overlap(self) -> dict[str, Overlap]:
        """How far inputs, and classes, open the same blocks, for each gate."""
        return {name: gate.overlap() for name, gate in self.gates.items()}

    def warnings(self) -> list[str]:
        """What looks wrong, a sentence each; empty if nothing does."""
        return [str(finding) for finding in self.findings()]

    def findings(self) -> list[Finding]:
        """The same with the gate and the kind of each, so that a program can tell them apart."""
        return [Finding(name, *found) for name, gate in self.gates.items() for found in judge(gate)]

    def to_dict(self) -> dict[str, Any]:
        """Counts, densities, overlaps and warnings, ready for JSON; without traces and pair counts."""
        return {"gates": {name: gate.to_dict() for name, gate in self.gates.items()}, "warnings": self.warnings()}

    def to_html(
        self,
        path: str | os.PathLike[str],
        *,
        tokens: Sequence[str] | None = None,
        class_names: Sequence[str] | None = None,
        gates: Sequence[str] | None = None,
        history: Sequence[Mapping[str, Any]] | None = None,
        title: str = "Gate atlas",
    ) -> Path:
        """Writes the gate atlas: one interactive page about all gates, which needs no network.

        It shows every matrix as a map of its blocks (how often each opens, how large its gate is), lights the blocks
        that each token opens, compares tokens and classes by the blocks they share, and has the shares of blocks that
        are always on, input dependent, rarely open and dead.

        Args:
            path: a .html file.
            tokens: the words, one for each row that was kept with `record_gates(model, trace=...)`; numbers if None. A
                gate that saw another number of rows is shown without them.
            class_names: what to call the classes, by label; the labels themselves if None.
            gates: names of the gates to show; all of them if None.
            history: the shares over training: a mapping for each epoch with `epoch`, `always_open`, `input_dependent`
                and `dead_blocks`, as the rows of a run's epochs.csv.
            title: of the page.
        """
        return write_atlas(
            select_gates(self.gates, gates), path, tokens=tokens, class_names=class_names, history=history, title=title
        )

    def _see(self, name: str, gate: Gate, _: Tensor, values: Tensor, indices: Tensor) -> None:
        labels = None if self._labels is None else self._labels.take(name, values.shape[0])
        self.gates[name].add(values.detach(), indices, gate.target_density, labels)


class _Labels:
    """The labels of a block of rows, dealt out to each gate in order."""

    def __init__(self, labels: Tensor | Sequence[int]) -> None:
        try:
            self.labels = torch.as_tensor(labels).detach().flatten().cpu()
            got = f"{len(self.labels)} of {self.labels.dtype}"
        except (TypeError, ValueError, RuntimeError):
            self.labels, got = torch.empty(0), type(labels).__name__
        if not len(self.labels) or self.labels.dtype not in WHOLE_NUMBERS:
            raise invalid("labels", expected="whole numbers, one for each row", got=got, remedy="Number the classes.")
        self.taken: dict[str, int] = {}

    def take(self, name: str, rows: int) -> Tensor:
        first = self.taken.get(name, 0)
        if first + rows > len(self.labels):
            raise invalid(
                "labels",
                expected=f"one for each row of {name}, which sees {first + rows}",
                got=len(self.labels),
                remedy="Repeat the label of a sequence for each of its T steps: y.repeat(T) for recurrent layers, "
                "which go through time first whatever batch_first says, and y.repeat_interleave(T) for other layers "
                "on (batch, time, features).",
            )
        self.taken[name] = (first + rows) % len(self.labels)
        return self.labels[first : first + rows]

    def check_used_up(self) -> None:
        left = {name: taken for name, taken in self.taken.items() if taken}
        if left:
            name, taken = next(iter(left.items()))
            raise invalid(
                "labels",
                expected=f"{taken}, the rows that {name} saw",
                got=len(self.labels),
                remedy="One for each row.",
            )
