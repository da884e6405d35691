"""Matrices and LSTMs prepared for native calls: checked once, then named by a number."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from blockgate.formats import PackedWeight, get_format
from blockgate.ops.packed_linear import (
    pack_blocks,
    prepare_dynamic_linear,
    prepare_packed_linear,
    release_prepared_linear,
    run_prepared_linear,
    run_prepared_lstm,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockgate.formats import Format
    from blockgate.gates import Gate
    from blockgate.gates.topk import TopKGate
    from blockgate.grid import BlockGrid

__all__ = ["PreparedLSTM", "PreparedLinear", "copied_of", "pack_weight"]


def pack_weight(weight: Tensor, grid: BlockGrid, stored_as: Format) -> PackedWeight:
    """A weight (m, n) in some format."""
    return PackedWeight(*pack_blocks(weight.detach().float(), grid.block, stored_as.name))


def copied_of(weight: Tensor | None, gate: Gate | None) -> list[Tensor]:
    """The tensors of a matrix and its gate that preparing them copies; what is not among them is read in place."""
    found = [] if gate is None else gate.copied()
    return found if weight is None else [weight, *found]


class PreparedLinear:
    """A packed matrix prepared for native calls, with its gate or with every block open.

    Args:
        packed: its weight.
        bias: (m) or None; read anew on every call, as are the biases of a gate that computes with its own.
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


class PreparedLSTM:
    """A stack of LSTM layers prepared to run over all their steps in one call.

    Args:
        matrices: the prepared matrices, for each layer the one of the input and the one of the last state.
    """

    def __init__(self, matrices: Sequence[PreparedLinear]) -> None:
        self.matrices = matrices
        self.handles = [matrix.handle for matrix in matrices]

    def __call__(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Output (T, N, H) and last h and c (L, N, H), for x (T, N, in) and the state to start from."""
        open_blocks = [1 if matrix.gate is None else matrix.gate._open_blocks for matrix in self.matrices]
        y, h, c = run_prepared_lstm(x, *state, self.handles, open_blocks)
        return y, (h, c)
