"""What every LSTM of ours shares: nn.LSTM's way of being called, and the step from sums to states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from blockgate.errors import invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = [
    "LSTMInterface",
    "LSTMState",
    "SegmentRun",
    "Segments",
    "check_state",
    "is_plain_lstm",
    "matrix_names",
    "no_state",
    "recur",
    "run_layers",
    "step_by_step",
]

# h and c.
LSTMState = tuple[Tensor, Tensor]

# Runs of steps with the same number of sequences, (steps, rows) each, rows falling. A batch of equal lengths is one.
Segments = list[tuple[int, int]]


# Rows of one segment (steps, rows, ...) and the state of its sequences, to output (steps, rows, H) and new state.
SegmentRun: TypeAlias = "Callable[[Tensor, LSTMState], tuple[Tensor, LSTMState]]"


def _step(sums: Tensor, c: Tensor) -> LSTMState:
    """New h and c, (N, H) each, from the sums before the non-linearities (N, 4H) and the old c."""
    i, f, g, o = sums.chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


class LSTMInterface(nn.Module, ABC):
    """nn.LSTM's call around `_run`: layouts, unbatched input, packed sequences, states in and out.

    Args:
        input_size: features of the input.
        hidden_size: features of h and c.
        num_layers: how many layers.
        batch_first: whether input and output are (batch, time, features).
    """

    def __init__(self, input_size: int, hidden_size: int, num_layers: int, batch_first: bool) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.batch_first = batch_first

    @abstractmethod
    def _run(self, rows: Tensor, segments: Segments, state: LSTMState) -> tuple[Tensor, LSTMState]:
        """All layers over rows (R, input_size), step after step: output (R, H), last h and c (L, N, H)."""

    def forward(
        self, x: Tensor | PackedSequence, hx: LSTMState | None = None
    ) -> tuple[Tensor | PackedSequence, LSTMState]:
        """Output for every step, and the state after the last one, in nn.LSTM's shapes.

        Args:
            x: (T, N, input_size), (N, T, input_size) with batch_first, unbatched (T, input_size), or packed sequences.
            hx: (h, c), each (num_layers, N, hidden_size), unbatched (num_layers, hidden_size); zeros if None.
        """
        if isinstance(x, PackedSequence):
            return self._forward_packed(x, hx)
        self._check_sequence(x)
        unbatched = x.dim() == 2
        if unbatched:
            x = x.unsqueeze(1)
            if hx is not None:
                h, c = check_state(hx, (self.num_layers, self.hidden_size))
                hx = h.unsqueeze(1), c.unsqueeze(1)
        elif self.batch_first:
            x = x.transpose(0, 1)
        steps, rows, _ = x.shape
        state = self._initial(hx, rows, x)
        y, (h, c) = self._run(x.reshape(steps * rows, self.input_size), [(steps, rows)], state)
        y = y.view(steps, rows, self.hidden_size)
        if unbatched:
            return y.squeeze(1), (h.squeeze(1), c.squeeze(1))
        return (y.transpose(0, 1) if self.batch_first else y), (h, c)

    def _forward_packed(self, x: PackedSequence, hx: LSTMState | None) -> tuple[PackedSequence, LSTMState]:
        segments = _segments_of(x.batch_sizes)
        if x.data.dim() != 2 or x.data.shape[-1] != self.input_size:
            raise self._wrong_input(x.data)
        state = self._initial(_reorder(hx, x.sorted_indices), segments[0][1], x.data)
        y, last = self._run(x.data, segments, state)
        packed = PackedSequence(y, x.batch_sizes, x.sorted_indices, x.unsorted_indices)
        return packed, _reorder(last, x.unsorted_indices) or last

    def _initial(self, hx: LSTMState | None, rows: int, like: Tensor) -> LSTMState:
        shape = (self.num_layers, rows, self.hidden_size)
        return no_state(shape, like) if hx is None else check_state(hx, shape)

    def _check_sequence(self, x: Tensor) -> None:
        if not isinstance(x, Tensor) or x.dim() not in {2, 3} or x.shape[-1] != self.input_size or x.numel() == 0:
            raise self._wrong_input(x)

    def _wrong_input(self, x: object) -> Exception:
        layout = "(batch, time" if self.batch_first else "(time, batch"
        return invalid(
            "input",
            expected=f"shape {layout}, {self.input_size}) or (time, {self.input_size}), with at least one step",
            got=tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__,
            remedy="The last dimension must be input_size.",
        )


def matrix_names(num_layers: int) -> list[str]:
    """The ends of the names of an LSTM's parameters, in its order: "ih_l0", "hh_l0", "ih_l1", ..."""
    return [f"{part}_l{layer}" for layer in range(num_layers) for part in ("ih", "hh")]


def is_plain_lstm(lstm: nn.LSTM) -> bool:
    """Whether an nn.LSTM runs in one direction and without projection: all that our LSTMs compute."""
    return not lstm.bidirectional and not lstm.proj_size


def no_state(shape: Sequence[int], like: Tensor) -> LSTMState:
    """h and c to start a sequence from."""
    zeros = like.new_zeros(shape)
    return zeros, zeros


def check_state(hx: LSTMState, shape: Sequence[int]) -> LSTMState:
    """Returns h and c if both have this shape."""
    if isinstance(hx, (tuple, list)) and len(hx) == 2 and hx[0].shape == shape and hx[1].shape == shape:
        return hx[0], hx[1]
    raise invalid(
        "hx",
        expected=f"(h, c), each of shape {tuple(shape)}",
        got=[tuple(s.shape) for s in hx] if isinstance(hx, (tuple, list)) else type(hx).__name__,
        remedy="Pass on what the last call returned.",
    )


def step_by_step(sums: Tensor, state: LSTMState, product: Callable[[Tensor], Tensor]) -> tuple[Tensor, LSTMState]:
    """A layer's recurrence: sums (T, N, 4H) of the input's products to output (T, N, H), with the product of h."""
    h, c = state
    outputs = []
    for step in sums:
        h, c = _step(step + product(h), c)
        outputs.append(h)
    return torch.stack(outputs), (h, c)


def run_layers(
    rows: Tensor,
    segments: Segments,
    state: LSTMState,
    layers: Iterable[tuple[Callable[[Tensor], Tensor], SegmentRun]],
    dropout: float = 0.0,
    observe: Callable[[int, Tensor], None] | None = None,
) -> tuple[Tensor, LSTMState]:
    """A stack of layers, each over the whole sequence.

    Args:
        rows: (R, in) of all segments.
        segments: see `recur`.
        state: h and c, (L, N, H) each.
        layers: for each its product with all rows of the input at once, and its recurrence.
        dropout: share of features dropped between layers.
        observe: told the number of every layer and its output (R, H).

    Returns:
        Output (R, H), last h and c (L, N, H).
    """
    last = []
    for layer, (product, recurrence) in enumerate(layers):
        if layer and dropout:
            rows = nn.functional.dropout(rows, dropout)
        rows, after = recur(product(rows), segments, (state[0][layer], state[1][layer]), recurrence)
        last.append(after)
        if observe is not None:
            observe(layer, rows)
    h, c = (torch.stack(states) for states in zip(*last, strict=True))
    return rows, (h, c)


def recur(sums: Tensor, segments: Segments, state: LSTMState, run: SegmentRun) -> tuple[Tensor, LSTMState]:
    """Runs a recurrence over segments whose rows fall: sequences that end keep their last state.

    Args:
        sums: (R, ...) rows of all segments, one after the other.
        segments: (steps, rows) each.
        state: h and c to start from; the rows are their dimension -2.
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
    finished: list[LSTMState] = []
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
    h, c = (torch.cat(parts, dim=-2) for parts in zip(state, *finished, strict=True))
    return torch.cat(outputs), (h, c)


def _narrow(state: LSTMState, first: int, rows: int) -> LSTMState:
    h, c = state
    return h.narrow(-2, first, rows), c.narrow(-2, first, rows)


def _segments_of(batch_sizes: Tensor) -> Segments:
    """Segments of packed sequences, from the number of sequences that are alive at each step."""
    sizes, steps = torch.unique_consecutive(batch_sizes, return_counts=True)
    return list(zip(steps.tolist(), sizes.tolist(), strict=True))


def _reorder(state: LSTMState | None, order: Tensor | None) -> LSTMState | None:
    if state is None or order is None:
        return state
    h, c = state
    return h.index_select(-2, order), c.index_select(-2, order)
