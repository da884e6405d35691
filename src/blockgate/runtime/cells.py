"""The cells of recurrent layers: what tells an LSTM from a GRU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from blockgate.errors import invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["GRU", "LSTM", "Cell", "LSTMState", "State"]

# h and c.
LSTMState: TypeAlias = tuple[Tensor, Tensor]
# What a cell carries from step to step: h and c of an LSTM, h of a GRU.
State: TypeAlias = tuple[Tensor, ...]


class Cell(ABC):
    """One kind of cell. `gates` counts its sums a unit, in torch's order; `name` is that of its layer in torch.nn."""

    name: str
    gates: int

    @abstractmethod
    def step(self, from_input: Tensor, from_state: Tensor, state: State) -> State:
        """The new state (N, H), from the sums of input and last state (N, gates * H), biases included."""

    @abstractmethod
    def start(self, shape: Sequence[int], like: Tensor) -> State:
        """The state to start a sequence from."""

    @abstractmethod
    def check(self, hx: Any, shape: Sequence[int]) -> State:
        """The state in `hx`, as torch's layer takes it, if everything in it has this shape; else a clear error."""

    @abstractmethod
    def give(self, state: State) -> Any:
        """The state as torch's layer returns it."""


class _LSTM(Cell):
    """Gates i, f, g, o."""

    name, gates = "LSTM", 4

    def step(self, from_input: Tensor, from_state: Tensor, state: State) -> State:
        i, f, g, o = (from_input + from_state).chunk(4, dim=-1)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c

    def start(self, shape: Sequence[int], like: Tensor) -> State:
        zeros = like.new_zeros(shape)
        return zeros, zeros

    def check(self, hx: Any, shape: Sequence[int]) -> State:
        if isinstance(hx, (tuple, list)) and len(hx) == 2 and hx[0].shape == shape and hx[1].shape == shape:
            return hx[0], hx[1]
        raise invalid(
            "hx",
            expected=f"(h, c), each of shape {tuple(shape)}",
            got=[tuple(s.shape) for s in hx] if isinstance(hx, (tuple, list)) else type(hx).__name__,
            remedy="Pass on what the last call returned.",
        )

    def give(self, state: State) -> LSTMState:
        h, c = state
        return h, c


class _GRU(Cell):
    """Gates r, z, n. The state's sum of n, bias included, is multiplied by r."""

    name, gates = "GRU", 3

    def step(self, from_input: Tensor, from_state: Tensor, state: State) -> State:
        (x_r, x_z, x_n), (h_r, h_z, h_n) = from_input.chunk(3, dim=-1), from_state.chunk(3, dim=-1)
        r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
        n = torch.tanh(x_n + r * h_n)
        return (n + z * (state[0] - n),)

    def start(self, shape: Sequence[int], like: Tensor) -> State:
        return (like.new_zeros(shape),)

    def check(self, hx: Any, shape: Sequence[int]) -> State:
        if isinstance(hx, Tensor) and hx.shape == shape:
            return (hx,)
        raise invalid(
            "hx",
            expected=f"h of shape {tuple(shape)}",
            got=tuple(hx.shape) if isinstance(hx, Tensor) else type(hx).__name__,
            remedy="Pass on what the last call returned.",
        )

    def give(self, state: State) -> Tensor:
        return state[0]


LSTM: Cell = _LSTM()
GRU: Cell = _GRU()
