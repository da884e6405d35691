"""What is kept about one gate: sums over all rows it saw, so that memory doesn't grow with their number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from blockgate.errors import invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockgate.grid import BlockGrid

__all__ = ["GateStatistics", "Overlap", "Shares", "select_gates"]

# Rows are worked off in chunks of at most this many (row, block) cells.
CHUNK_CELLS = 2**22


class Shares(NamedTuple):
    """Shares of a gate's blocks, which add up to 1 (Fig. 2 of the paper)."""

    always_on: float
    input_dependent: float
    always_off: float


class Overlap(NamedTuple):
    """The expected share of one row's open blocks that another row opens too; None where nothing can be compared.

    `inputs` compares any two rows, `within_classes` rows of the same class, `between_classes` rows of different ones.
    Blocks opened at random would give the density.
    """

    inputs: float | None
    within_classes: float | None
    between_classes: float | None


class GateStatistics:
    """Sums over every row that one gate decided on.

    Args:
        grid: the gate's block grid, r x c.
        coactivation: whether to count which blocks open together.
        trace: how many of the last rows to keep whole.

    Attributes:
        rows: rows seen.
        empty_rows: rows that opened no block at all.
        open_counts: (r * c) rows that opened each block.
        value_sum: (r * c) sum of gate values, in float64.
        value_square_sum: (r * c) sum of their squares.
        pair_counts: (r * c, r * c) rows that opened both blocks, or None.
        class_rows: rows seen of each label.
        class_open_counts: for each label (r * c) rows of it that opened each block.
        trace: (n, r * c) gate values of the last n rows, oldest first, 0 where closed.
    """

    def __init__(self, grid: BlockGrid, *, coactivation: bool, trace: int) -> None:
        blocks = grid.num_blocks
        self.grid = grid
        self.rows = self.empty_rows = 0
        with torch.inference_mode(False):
            self.open_counts = torch.zeros(blocks, dtype=torch.int64)
            self.value_sum = torch.zeros(blocks, dtype=torch.float64)
            self.value_square_sum = torch.zeros(blocks, dtype=torch.float64)
            self.pair_counts = torch.zeros(blocks, blocks, dtype=torch.int64) if coactivation else None
            self.trace = torch.zeros(0, blocks)
        self.class_rows: dict[int, int] = {}
        self.class_open_counts: dict[int, Tensor] = {}
        self._trace_rows = trace
        self._target_sum = 0.0

    def add(self, values: Tensor, indices: Tensor, target_density: float, labels: Tensor | None) -> None:
        """Counts compact gates in, values and indices (N, E), with labels (N) or none."""
        if values.is_meta:
            raise invalid("gate values", expected="real tensors", got="meta", remedy="Run the model on a real device.")
        self._target_sum += target_density * values.shape[0]
        chunk = max(1, CHUNK_CELLS // self.grid.num_blocks)
        # Sums must be ordinary tensors and exact, whatever mode the model runs in.
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(values.device.type, enabled=False):
            for first in range(0, values.shape[0], chunk):
                part = slice(first, first + chunk)
                gates = values.new_zeros(values[part].shape[0], self.grid.num_blocks)
                gates.scatter_add_(1, indices[part], values[part])
                self._add_gates(gates, None if labels is None else labels[part])

    def merge(self, other: GateStatistics) -> None:
        """Counts in all that was counted elsewhere, of the same gate."""
        self.rows += other.rows
        self.empty_rows += other.empty_rows
        self.open_counts += other.open_counts
        self.value_sum += other.value_sum
        self.value_square_sum += other.value_square_sum
        if self.pair_counts is not None and other.pair_counts is not None:
            self.pair_counts += other.pair_counts
        self.trace = torch.cat([self.trace, other.trace])
        self._target_sum += other._target_sum
        for label, rows in other.class_rows.items():
            self.class_rows[label] = self.class_rows.get(label, 0) + rows
            self.class_open_counts[label] = self.class_open_counts.get(label, 0) + other.class_open_counts[label]

    def _add_gates(self, gates: Tensor, labels: Tensor | None) -> None:
        """Counts gates (N, r * c) in."""
        opened = gates != 0
        self.rows += gates.shape[0]
        self.empty_rows += int((~opened.any(1)).sum())
        self.open_counts += opened.sum(0).cpu()
        self.value_sum += gates.sum(0, dtype=torch.float64).cpu()
        self.value_square_sum += gates.double().square().sum(0).cpu()
        if self.pair_counts is not None:
            # Exact: a chunk has fewer rows than float32 has whole numbers.
            ones = opened.to(torch.float32)
            self.pair_counts += (ones.T @ ones).cpu().long()
        if self._trace_rows:
            self.trace = torch.cat([self.trace, gates[-self._trace_rows :].float().cpu()])[-self._trace_rows :]
        if labels is not None:
            self._add_classes(opened.cpu(), labels.cpu())

    def _add_classes(self, opened: Tensor, labels: Tensor) -> None:
        """Counts open blocks (N, r * c) in, under the label of each row."""
        found, number, rows = labels.unique(return_inverse=True, return_counts=True)
        counts = torch.zeros(len(found), self.grid.num_blocks, dtype=torch.int64)
        counts.index_add_(0, number, opened.long())
        for label, count, n in zip(found.tolist(), counts, rows.tolist(), strict=True):
            self.class_rows[label] = self.class_rows.get(label, 0) + n
            self.class_open_counts[label] = self.class_open_counts.get(label, 0) + count

    @property
    def labels(self) -> list[int]:
        """The labels seen, in order."""
        return sorted(self.class_rows)

    @property
    def target_density(self) -> float | None:
        """What was asked for, averaged over the rows seen."""
        return self._target_sum / self.rows if self.rows else None

    @property
    def measured_density(self) -> float | None:
        """The share of blocks that opened, over all rows."""
        return int(self.open_counts.sum()) / (self.rows * self.grid.num_blocks) if self.rows else None

    @property
    def value_mean(self) -> float | None:
        """Mean value of open gates; None if none opened or one was not finite."""
        return self._moments()[0]

    @property
    def value_std(self) -> float | None:
        """Standard deviation of the values of open gates."""
        return self._moments()[1]

    def frequency(self, label: int | None = None) -> Tensor:
        """How often each block opens, (r, c) in [0, 1]: over all rows, or those of one class."""
        rows = self.rows if label is None else self.class_rows.get(label, 0)
        if not rows:
            what = "rows" if label is None else f"rows labelled {label!r}"
            raise invalid(what, expected="some", got=f"none, of labels {self.labels}", remedy="Record the model first.")
        counts = self.open_counts if label is None else self.class_open_counts[label]
        return counts.double().div(rows).view(self.grid.out_blocks, self.grid.in_blocks)

    def shares(self, threshold: float) -> Shares:
        """Blocks open for at least `threshold` of the rows, closed for at least `threshold`, and those in between."""
        frequency = self.frequency()
        on = int((frequency >= threshold).sum())
        # From counts: 1 - frequency would be off by a rounding just where it decides.
        off = int(((self.rows - self.open_counts).double() / self.rows >= threshold).sum())
        blocks = self.grid.num_blocks
        return Shares(on / blocks, (blocks - on - off) / blocks, off / blocks)

    def overlap(self) -> Overlap:
        """How far inputs open the same blocks."""
        within = [_pair_overlap(self.class_open_counts[label], self.class_rows[label]) for label in self.labels]
        matrix = self.class_overlap()
        upper = matrix[torch.ones_like(matrix, dtype=torch.bool).triu(1)]
        return Overlap(_pair_overlap(self.open_counts, self.rows), _mean(within), _mean(upper.tolist()))

    def class_overlap(self, labels: list[int] | None = None) -> Tensor:
        """For each pair of labels, in the order of `labels`, the share of open blocks that their rows have in common.

        A class is compared with itself by pairs of different rows. NaN where nothing can be compared.

        Args:
            labels: those to compare; all that were seen if None.
        """
        labels = self.labels if labels is None else labels
        matrix = torch.full((len(labels), len(labels)), math.nan, dtype=torch.float64)
        for i, one in enumerate(labels):
            same = _pair_overlap(self.class_open_counts[one], self.class_rows[one])
            matrix[i, i] = math.nan if same is None else same
            for j, other in enumerate(labels[:i]):
                p, q = self.frequency(one), self.frequency(other)
                if total := (p.sum() + q.sum()).item():
                    matrix[i, j] = matrix[j, i] = 2 * (p * q).sum().item() / total
        return matrix

    def to_dict(self) -> dict[str, Any]:
        """All but the trace and the pair counts, ready for JSON."""
        return {
            "out_features": self.grid.out_features,
            "in_features": self.grid.in_features,
            "block": list(self.grid.block),
            "rows": self.rows,
            "empty_rows": self.empty_rows,
            "target_density": self.target_density,
            "measured_density": self.measured_density,
            "value_mean": self.value_mean,
            "value_std": self.value_std,
            "overlap": self.overlap()._asdict(),
            "open_counts": self.open_counts.tolist(),
            "classes": {
                str(label): {"rows": self.class_rows[label], "open_counts": self.class_open_counts[label].tolist()}
                for label in self.labels
            },
        }

    def _moments(self) -> tuple[float | None, float | None]:
        count = int(self.open_counts.sum())
        if not count:
            return None, None
        mean = self.value_sum.sum().item() / count
        variance = self.value_square_sum.sum().item() / count - mean**2
        return (mean, math.sqrt(max(0.0, variance))) if math.isfinite(variance) else (None, None)


def select_gates(gates: dict[str, GateStatistics], names: Sequence[str] | None) -> dict[str, GateStatistics]:
    """The gates of these names, or all."""
    if names is None:
        return gates
    unknown = [name for name in names if name not in gates]
    if unknown:
        raise invalid("gates", expected=f"names among {list(gates)}", got=unknown, remedy="Pass a list of names.")
    return {name: gates[name] for name in names}


def _pair_overlap(open_counts: Tensor, rows: int) -> float | None:
    """Over all pairs of different rows: expected blocks open in both, as a share of those open in one."""
    opened = int(open_counts.sum())
    if rows < 2 or not opened:
        return None
    counts = open_counts.double()
    return (counts * (counts - 1)).sum().item() / ((rows - 1) * opened)


def _mean(values: list[float | None] | list[float]) -> float | None:
    """The mean of what could be compared."""
    known = [v for v in values if v is not None and not math.isnan(v)]
    return sum(known) / len(known) if known else None
