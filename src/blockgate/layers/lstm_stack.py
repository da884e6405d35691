"""The parameters of gated LSTM layers under torch's names, and a gate for each matrix."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from blockgate.gates import make_gate
from blockgate.runtime.lstm import RunnableLSTM

if TYPE_CHECKING:
    from typing_extensions import Self

    from blockgate.spec import GateSpec

__all__ = ["GatedLSTMStack"]


class GatedLSTMStack(RunnableLSTM):
    """One or more LSTM layers, told apart by the suffix of their parameters' names ("_l0", ... or none)."""

    def _add_layer(
        self, suffix: str, input_size: int, hidden_size: int, bias: bool, spec: GateSpec, place: dict[str, Any]
    ) -> None:
        """Registers the weights and biases of one more layer, still without values, and its gates.

        `place` is device and dtype of the parameters.
        """
        sizes = {"ih": input_size, "hh": hidden_size}
        for part, size in sizes.items():
            self.register_parameter(f"weight_{part}{suffix}", nn.Parameter(torch.empty(4 * hidden_size, size, **place)))
        for part in sizes:
            made = nn.Parameter(torch.empty(4 * hidden_size, **place)) if bias else None
            self.register_parameter(f"bias_{part}{suffix}", made)
        for part, size in sizes.items():
            self.add_module(f"gate_{part}{suffix}", make_gate(spec, spec.grid(4 * hidden_size, size), **place))
        self._suffixes.append(suffix)

    def _reset_dense(self, hidden_size: int) -> None:
        """Weights and biases as torch starts them."""
        bound = 1 / math.sqrt(hidden_size)
        for parameter in self._parameters.values():
            if parameter is not None:
                nn.init.uniform_(parameter, -bound, bound)

    def _reset_gates(self) -> None:
        for gate in self._gates():
            gate.reset_parameters()

    def _take_dense(self, dense: nn.Module) -> Self:
        """Takes over the parameters of a dense layer; gates start near 1."""
        for name, parameter in self._parameters.items():
            if parameter is not None:
                setattr(self, name, dense._parameters[name])
        for name, gate in self._named_gates():
            gate.reset_near_dense(self._parameters[f"weight_{name}"])
        return self.train(dense.training)

    def _grid_repr(self) -> str:
        (block_out, block_in), grids = self._gates()[0].grid.block, [gate.grid for gate in self._gates()]
        blocks = ", ".join(f"{grid.out_blocks}x{grid.in_blocks}" for grid in grids)
        return f"block_size=({block_out}, {block_in}), blocks=({blocks}), backend={self.backend}"
