"""Matrices and recurrent layers prepared for native calls: checked once, then named by a number."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from blockgate.formats import PackedWeight, get_format
from blockgate.ops.packed_linear import (
    adaptive_counts,
    pack_blocks,
    prepare_dynamic_linear,
    prepare_packed_linear,
    prepared_choice,
    release_prepared_linear,
    run_prepared_gru,
    run_prepared_linear,
    run_prepared_lstm,
)
from blockgate.runtime.cells import LSTM, Cell, State
from blockgate.runtime.recurrent import Segments, recur, run_layer, run_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockgate.formats import Format
    from blockgate.gates import Gate
    from blockgate.gates.topk import TopKGate
    from blockgate.grid import BlockGrid

__all__ = [
    "Prepared",
    "PreparedBothWays",
    "PreparedLinear",
    "PreparedStack",
    "Ways",
    "copied_of",
    "pack_weight",
    "prepared_stack",
]


def pack_weight(weight: Tensor, grid: BlockGrid, stored_as: Format) -> PackedWeight:
    """A weight (m, n) in some format."""
    return PackedWeight(*pack_blocks(weight.detach().float(), grid.block, stored_as.name))


def copied_of(weight: Tensor | None, gate: Gate | None) -> list[Tensor]:
    """The tensors of a matrix and its gate that preparing them copies; what is not among them is read in place."""
    found = [] if gate is None else gate.copied()
    return found if weight is None else [weight, *found]


# What ways do, as csrc/host/prepared.h numbers them: rows share each block, or come one after the other.
KINDS = ("", "row by row")


class Ways(NamedTuple):
    """What calls of one kind have taught about the ways to run them, which all give the same result."""

    ways: list[tuple[int, str, float]]
    """Of each way: threads, what is done (one of `KINDS`), seconds for a row; 0 where that isn't known."""
    present: int
    """The way that is taken."""
    calls: int
    looks: int
    """Calls that looked at another way."""
    falls: int
    """How often a call took so long that the next ones ran on one thread."""

    @classmethod
    def of(cls, handle: int, use: str, rows: int) -> Ways:
        """Those of the calls with about so many rows; `use` is "layer", or "steps" or "stack" of a recurrence."""
        ways, counts = prepared_choice(handle, use, rows)
        found = [(int(threads), KINDS[int(kind)], seconds) for threads, kind, seconds in ways.tolist()]
        return cls(found, *counts.tolist())

    def text(self, rows: int) -> str:
        """The present way and the others, with the time of a call of so many rows."""
        if not self.calls:
            return ""
        named = [
            f"{', '.join(filter(None, (_threads(threads), kind)))} {_time(rows * seconds)}"
            for threads, kind, seconds in self.ways
        ]
        others = "; ".join(name for way, name in enumerate(named) if way != self.present)
        crowded = f", {self.falls} of {self.calls} calls held up" if self.falls else ""
        return f"{named[self.present]} ({others}){crowded}"


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds else "not tried"


class PreparedLinear:
    """A packed matrix prepared for native calls, with its gate or with every block open.

    Args:
        packed: its weight.
        bias: (m) or None; read again on every call, as are the biases of a gate that computes with its own.
        grid: the cut of the weight.
        stored_as: the format of the weight.
        gate: a gate that native code computes, whose weights are packed here, each as one block of float32; None where
            every block is open.
    """

    def __init__(
        self,
        packed: PackedWeight,
        bias: Tensor | None,
        grid: BlockGrid,
        stored_as: Format,
        gate: TopKGate | None = None,
    ) -> None:
        self.in_features, self.out_features = grid.in_features, grid.out_features
        self.gate = gate
        sizes = [grid.out_features, grid.in_features, *grid.block]
        if gate is None:
            self.handle: int = prepare_packed_linear(*packed, bias, sizes, stored_as.name)
        else:
            # Native code reads the biases from where they are.
            with torch.no_grad():
                network = gate.network()
            gate_weight, hidden_weight = (
                None if w is None else pack_blocks(w.detach().float(), w.shape, "float32")[0]
                for w in (network.weight, network.hidden_weight)
            )
            self.handle = prepare_dynamic_linear(
                *packed,
                bias,
                sizes,
                stored_as.name,
                gate_weight,
                network.bias,
                hidden_weight,
                network.hidden_bias,
                [gate.key_offset, gate.key_size],
                gate.groups,
                gate.normalise,
            )
        weakref.finalize(self, release_prepared_linear, self.handle).atexit = False

    @classmethod
    def copy_of(cls, weight: Tensor, bias: Tensor | None, gate: Gate) -> PreparedLinear:
        """A weight (m, n) copied as it is, to float32 blocks, and prepared with its gate."""
        stored_as = get_format("float32")
        return cls(pack_weight(weight, gate.grid, stored_as), bias, gate.grid, stored_as, cast("TopKGate", gate))

    def figures(self, x: Tensor) -> str:
        """What calls with about so many rows as x take; "" if there were none, or only one way to run them."""
        rows = x.numel() // self.in_features
        if not rows:
            return ""
        found = [Ways.of(self.handle, "layer", rows).text(rows)]
        asked, computed = adaptive_counts(self.handle)
        if asked:
            times = Ways.of(self.handle, "likeliest", rows).text(rows)
            groups = f"{computed / asked:.3g} groups of rare words computed for a row"
            found.append("likeliest words: " + ", ".join(filter(None, [times, groups])))
        return "; ".join(filter(None, found))

    def fits(self, x: Tensor) -> bool:
        """Whether the last dimension of x is the one that the layer takes."""
        shape = x.shape
        return bool(shape) and shape[-1] == self.in_features

    def __call__(self, x: Tensor) -> Tensor:
        """y (..., m) for x (..., n) in one call."""
        open_blocks = 1 if self.gate is None else self.gate._open_blocks
        if x.dim() == 2:
            return run_prepared_linear(x, self.handle, open_blocks)  # type: ignore[no-any-return]
        y: Tensor = run_prepared_linear(x.reshape(-1, self.in_features), self.handle, open_blocks)
        return y.view(*x.shape[:-1], self.out_features)


class PreparedStack:
    """A stack of recurrent layers of one direction, prepared to run over all their steps in one call.

    Args:
        cell: of all layers.
        matrices: the prepared matrices, for each layer the one of the input and the one of the last state.
    """

    def __init__(self, cell: Cell, matrices: Sequence[PreparedLinear]) -> None:
        self.is_lstm = cell is LSTM
        self.matrices = matrices
        self.handles = [matrix.handle for matrix in matrices]
        # Steps and rows of the last call.
        self._last = (0, 0)

    def __call__(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Output (T, N, H) and last state (L, N, H), for x (T, N, in) and the state to start from."""
        self._last = (x.shape[0], x.shape[1])
        open_blocks = [1 if matrix.gate is None else matrix.gate._open_blocks for matrix in self.matrices]
        run = run_prepared_lstm if self.is_lstm else run_prepared_gru
        y, *state = run(x, *state, self.handles, open_blocks)
        return y, tuple(state)

    def one(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """As a call, for a stack of one layer and a state of (N, H)."""
        y, state = self(x, tuple(s.unsqueeze(0) for s in state))
        return y, tuple(s.squeeze(0) for s in state)

    def run(self, rows: Tensor, segments: Segments, state: State) -> tuple[Tensor, State]:
        """Output (R, H) and last state (L, N, H), for the rows (R, in) of all segments."""
        return recur(rows, segments, state, self)

    def figures(self) -> str:
        """What calls like the last one take: a step of the whole stack, or a step of the first layer's recurrence."""
        steps, rows = self._last
        if not steps * rows:
            return ""
        return Ways.of(*((self.handles[0], "stack") if steps == 1 else (self.handles[1], "steps")), rows).text(1)


class PreparedBothWays:
    """A stack of recurrent layers of two directions: one call for each layer and direction, over all steps.

    Args:
        cell: of all layers.
        matrices: the prepared matrices, for each layer those of both directions in turn.
    """

    def __init__(self, cell: Cell, matrices: Sequence[PreparedLinear]) -> None:
        self.layers = [PreparedStack(cell, matrices[at : at + 2]) for at in range(0, len(matrices), 2)]

    def run(self, rows: Tensor, segments: Segments, state: State) -> tuple[Tensor, State]:
        """Output (R, 2 H) and last state (2 L, N, H), for the rows (R, in) of all segments."""
        layers = [
            partial(run_layer, segments=segments, product=_same, recurrence=layer.one, backwards=number % 2 == 1)
            for number, layer in enumerate(self.layers)
        ]
        return run_layers(rows, state, layers, directions=2)

    def figures(self) -> str:
        """What calls like the last one take, in the first layer and direction."""
        return self.layers[0].figures()


def _same(rows: Tensor) -> Tensor:
    return rows


Prepared: TypeAlias = "PreparedStack | PreparedBothWays"


def prepared_stack(cell: Cell, matrices: Sequence[PreparedLinear], bidirectional: bool) -> Prepared:
    """All layers prepared, from their prepared matrices in torch's order."""
    return PreparedBothWays(cell, matrices) if bidirectional else PreparedStack(cell, matrices)
