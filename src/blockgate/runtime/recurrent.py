"""What every recurrent layer of ours shares: torch's way of being called, and running layers over sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from blockgate.errors import invalid
from blockgate.gates.turn import Turn, from_the_end
from blockgate.runtime.cells import GRU, LSTM, Cell, LSTMState, State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "GRUInterface",
    "LSTMInterface",
    "LayerRun",
    "RecurrentInterface",
    "SegmentRun",
    "Segments",
    "has_projection",
    "matrix_names",
    "recur",
    "run_layer",
    "run_layers",
    "step_by_step",
    "suffixes_of",
]

# Runs of steps with the same number of sequences, (steps, rows) each, rows falling. A batch of equal lengths is one.
Segments: TypeAlias = list[tuple[int, int]]

# Rows of one segment (steps, rows, ...) and the state of its sequences, to output (steps, rows, H) and new state.
SegmentRun: TypeAlias = "Callable[[Tensor, State], tuple[Tensor, State]]"

# A layer in one direction: rows (R, in) and its state (N, H) to output (R, H), in the order of the rows, and new state.
LayerRun: TypeAlias = "Callable[[Tensor, State], tuple[Tensor, State]]"


class RecurrentInterface(nn.Module, ABC):
    """The call of torch's recurrent layers around `_run`: layouts, unbatched input, packed sequences, states.

    Args:
        input_size: features of the input.
        hidden_size: features of the state.
        num_layers: how many layers.
        batch_first: whether input and output are (batch, time, features).
        bidirectional: whether every layer also runs from the end, beside the other direction.
    """

    cell: Cell
    bidirectional: bool = False

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int, batch_first: bool, bidirectional: bool = False
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.batch_first, self.bidirectional = batch_first, bidirectional

    @abstractmethod
    def _run(self, rows: Tensor, segments: Segments, state: State) -> tuple[Tensor, State]:
        """All layers over rows (R, input_size), step after step: output (R, D * H), last state (L * D, N, H)."""

    def flatten_parameters(self) -> None:
        """Does nothing, since there is no cuDNN to lay out weights for: models call it on torch's layers."""

    @property
    def _directions(self) -> int:
        return 2 if self.bidirectional else 1

    def _call(self, x: Tensor | PackedSequence, hx: Any) -> tuple[Any, Any]:
        if isinstance(x, PackedSequence):
            return self._call_packed(x, hx)
        self._check_sequence(x)
        unbatched = x.dim() == 2
        if unbatched:
            x = x.unsqueeze(1)
            if hx is not None:
                state = self.cell.check(hx, (self.num_layers * self._directions, self.hidden_size))
                hx = self.cell.give(tuple(s.unsqueeze(1) for s in state))
        elif self.batch_first:
            x = x.transpose(0, 1)
        steps, rows, _ = x.shape
        state = self._initial(hx, rows, x)
        y, state = self._run(x.reshape(steps * rows, self.input_size), [(steps, rows)], state)
        y = y.view(steps, rows, y.shape[-1])
        if unbatched:
            return y.squeeze(1), self.cell.give(tuple(s.squeeze(1) for s in state))
        return (y.transpose(0, 1) if self.batch_first else y), self.cell.give(state)

    def _call_packed(self, x: PackedSequence, hx: Any) -> tuple[PackedSequence, Any]:
        segments = _segments_of(x.batch_sizes)
        if x.data.dim() != 2 or x.data.shape[-1] != self.input_size:
            raise self._wrong_input(x.data)
        state = self._initial(hx, segments[0][1], x.data)
        y, last = self._run(x.data, segments, _reorder(state, x.sorted_indices))
        packed = PackedSequence(y, x.batch_sizes, x.sorted_indices, x.unsorted_indices)
        return packed, self.cell.give(_reorder(last, x.unsorted_indices))

    def _initial(self, hx: Any, rows: int, like: Tensor) -> State:
        shape = (self.num_layers * self._directions, rows, self.hidden_size)
        return self.cell.start(shape, like) if hx is None else self.cell.check(hx, shape)

    def _check_sequence(self, x: Tensor) -> None:
        if not isinstance(x, Tensor) or x.dim() not in {2, 3} or x.shape[-1] != self.input_size:
            raise self._wrong_input(x)
        # A batch of none is answered with none, as torch does; a sequence of no steps has no last state.
        if not x.shape[1 if self.batch_first and x.dim() == 3 else 0]:
            raise self._wrong_input(x)

    def _wrong_input(self, x: object) -> Exception:
        layout = "(batch, time" if self.batch_first else "(time, batch"
        return invalid(
            "input",
            expected=f"shape {layout}, {self.input_size}) or (time, {self.input_size}), with at least one step",
            got=tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__,
            remedy="The last dimension must be input_size.",
        )


class LSTMInterface(RecurrentInterface):
    """nn.LSTM's call."""

    cell = LSTM

    def forward(
        self, x: Tensor | PackedSequence, hx: LSTMState | None = None
    ) -> tuple[Tensor | PackedSequence, LSTMState]:
        """Output for every step, and the state after the last one, in nn.LSTM's shapes.

        Args:
            x: (T, N, input_size), (N, T, input_size) with batch_first, unbatched (T, input_size), or packed sequences.
            hx: (h, c), each (num_layers, N, hidden_size), unbatched (num_layers, hidden_size), with two directions
                twice as many; zeros if None.
        """
        return self._call(x, hx)


class GRUInterface(RecurrentInterface):
    """nn.GRU's call."""

    cell = GRU

    def forward(self, x: Tensor | PackedSequence, hx: Tensor | None = None) -> tuple[Tensor | PackedSequence, Tensor]:
        """Output for every step, and the state after the last one, in nn.GRU's shapes.

        Args:
            x: (T, N, input_size), (N, T, input_size) with batch_first, unbatched (T, input_size), or packed sequences.
            hx: (num_layers, N, hidden_size), unbatched (num_layers, hidden_size), with two directions twice as many;
                zeros if None.
        """
        return self._call(x, hx)


def suffixes_of(num_layers: int, bidirectional: bool) -> list[str]:
    """The ends of the names of a layer's parameters, in torch's order: "_l0", "_l0_reverse", "_l1", ..."""
    ends = ("", "_reverse") if bidirectional else ("",)
    return [f"_l{layer}{end}" for layer in range(num_layers) for end in ends]


def matrix_names(layer: nn.Module) -> list[str]:
    """What follows "weight_" in the names of a recurrent layer's matrices: "ih_l0", "hh_l0", "ih_l1", ..."""
    suffixes = suffixes_of(getattr(layer, "num_layers", 0), getattr(layer, "bidirectional", False)) or [""]
    return [part + suffix for suffix in suffixes for part in ("ih", "hh")]


def has_projection(layer: nn.Module) -> bool:
    """Whether it is an LSTM of torch whose output goes through a projection, which none of our layers computes."""
    return isinstance(layer, nn.LSTM) and layer.proj_size > 0


def step_by_step(
    sums: Tensor, state: State, product: Callable[[Tensor], Tensor], cell: Cell = LSTM
) -> tuple[Tensor, State]:
    """A layer's recurrence: sums (T, N, gates * H) of the input's products to output (T, N, H); `product` is h's."""
    outputs = []
    for step in sums:
        state = cell.step(step, product(state[0]), state)
        outputs.append(state[0])
    return torch.stack(outputs), state


def run_layers(
    rows: Tensor, state: State, layers: Sequence[LayerRun], directions: int = 1, dropout: float = 0.0
) -> tuple[Tensor, State]:
    """A stack of layers, each over the whole sequence.

    Args:
        rows: (R, in) of all steps.
        state: of every layer and direction, (L * D, N, H) each.
        layers: how each layer runs, in each direction.
        directions: 1 or 2.
        dropout: share of features dropped between layers.

    Returns:
        Output (R, D * H), last state (L * D, N, H).
    """
    last = []
    for first in range(0, len(layers), directions):
        if first and dropout:
            rows = nn.functional.dropout(rows, dropout)
        outputs = []
        for number in range(first, first + directions):
            output, after = layers[number](rows, tuple(s[number] for s in state))
            outputs.append(output)
            last.append(after)
        rows = outputs[0] if directions == 1 else torch.cat(outputs, -1)
    return rows, tuple(torch.stack(states) for states in zip(*last, strict=True))


def run_layer(
    rows: Tensor,
    state: State,
    *,
    segments: Segments,
    product: Callable[[Tensor], Tensor],
    recurrence: SegmentRun,
    backwards: bool = False,
    observe: Callable[[Tensor], None] | None = None,
) -> tuple[Tensor, State]:
    """A layer in one direction over the whole sequence.

    Args:
        rows: (R, in) of all segments.
        state: (N, H) each.
        segments: see `recur`.
        product: of all rows at once.
        recurrence: of the product's results.
        backwards: whether every sequence is run from its end.
        observe: told the output (R, H), in the order in which it was made.

    Returns:
        Output (R, H) in the order of `rows`, last state (N, H).
    """
    sums = product(rows)
    if backwards:
        sums = turned(sums, segments)
    if backwards and not torch.compiler.is_compiling():
        sizes = [rows for steps, rows in segments for _ in range(steps)]
        with from_the_end(Turn(sizes, partial(_order, segments))):
            output, state = recur(sums, segments, state, recurrence)
    else:
        output, state = recur(sums, segments, state, recurrence)
    if observe is not None:
        observe(output)
    return (turned(output, segments) if backwards else output), state


def turned(rows: Tensor, segments: Segments) -> Tensor:
    """Rows (R, ...) with every sequence from its end to its start; turned twice, they are as before."""
    if len(segments) == 1:
        return rows.view(*segments[0], *rows.shape[1:]).flip(0).view(rows.shape)
    return rows.index_select(0, _order(segments).to(rows.device))


def _order(segments: Segments) -> Tensor:
    """Where each row stands once every sequence is turned."""
    alive = torch.tensor([rows for steps, rows in segments for _ in range(steps)])
    first = alive.cumsum(0) - alive
    sequence = torch.arange(int(alive[0]))
    here = alive[:, None] > sequence
    step = here.sum(0) - 1 - torch.arange(len(alive))[:, None]
    return (first[step.clamp(min=0)] + sequence)[here]


def recur(sums: Tensor, segments: Segments, state: State, run: SegmentRun) -> tuple[Tensor, State]:
    """Runs a recurrence over segments whose rows fall: sequences that end keep their last state.

    Args:
        sums: (R, ...) rows of all segments, one after the other.
        segments: (steps, rows) each.
        state: to start from; the rows are dimension -2.
        run: called with the rows of one segment (steps, rows, ...) and the state of its sequences; returns output
            (steps, rows, H) and the new state.

    Returns:
        Output (R, H), and the last state of every sequence.
    """
    if len(segments) == 1:
        # One token at a time, every call counts.
        output, state = run(sums.view(*segments[0], *sums.shape[1:]), state)
        return output.reshape(len(sums), output.shape[-1]), state
    outputs: list[Tensor] = []
    finished: list[State] = []
    first = 0
    for steps, rows in segments:
        ending = state[0].shape[-2] - rows
        if ending:
            finished.insert(0, _narrow(state, rows, ending))
            state = _narrow(state, 0, rows)
        part = sums.narrow(0, first, steps * rows)
        output, state = run(part.view(steps, rows, *sums.shape[1:]), state)
        outputs.append(output.reshape(steps * rows, output.shape[-1]))
        first += steps * rows
    return torch.cat(outputs), tuple(torch.cat(parts, dim=-2) for parts in zip(state, *finished, strict=True))


def _narrow(state: State, first: int, rows: int) -> State:
    return tuple(s.narrow(-2, first, rows) for s in state)


def _segments_of(batch_sizes: Tensor) -> Segments:
    """Segments of packed sequences, from the number of sequences that are alive at each step."""
    sizes, steps = torch.unique_consecutive(batch_sizes, return_counts=True)
    return list(zip(steps.tolist(), sizes.tolist(), strict=True))


def _reorder(state: State, order: Tensor | None) -> State:
    return state if order is None else tuple(s.index_select(-2, order) for s in state)
