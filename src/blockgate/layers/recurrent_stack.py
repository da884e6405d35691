"""The parameters of gated recurrent layers under torch's names, and a gate for each matrix."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from blockgate.errors import invalid
from blockgate.gates import make_gate
from blockgate.grid import check_size
from blockgate.layers.dropout import check_share
from blockgate.runtime.block_linear import check_rows
from blockgate.runtime.gated_recurrent import RunnableRecurrence
from blockgate.runtime.recurrent import RecurrentInterface, Segments, suffixes_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from blockgate.runtime.cells import LSTMState, State
    from blockgate.runtime.plan import Plan
    from blockgate.spec import GateSpec

__all__ = ["GatedCell", "GatedLayers", "GatedRecurrentStack"]


class GatedRecurrentStack(RunnableRecurrence):
    """One or more recurrent layers, told apart by the suffix of their parameters' names ("_l0", ... or none)."""

    hidden_size: int
    bias: bool

    def _add_layer(
        self, suffix: str, input_size: int, hidden_size: int, bias: bool, spec: GateSpec, place: dict[str, Any]
    ) -> None:
        """Registers the weights and biases of one more layer, still without values, and its gates.

        `place` is device and dtype of the parameters.
        """
        sizes, out = {"ih": input_size, "hh": hidden_size}, self.cell.gates * hidden_size
        for part, size in sizes.items():
            self.register_parameter(f"weight_{part}{suffix}", nn.Parameter(torch.empty(out, size, **place)))
        for part in sizes:
            made = nn.Parameter(torch.empty(out, **place)) if bias else None
            self.register_parameter(f"bias_{part}{suffix}", made)
        for part, size in sizes.items():
            self.add_module(f"gate_{part}{suffix}", make_gate(spec, spec.grid(out, size), **place))
        self._suffixes.append(suffix)

    def reset_parameters(self) -> None:
        """Fresh weights: those of torch's layer, and those of the gates."""
        self._reset_dense()
        for gate in self._gates():
            gate.reset_parameters()

    def _reset_dense(self) -> None:
        """Weights and biases as torch starts them."""
        bound = 1 / math.sqrt(self.hidden_size)
        for parameter in self._parameters.values():
            if parameter is not None:
                nn.init.uniform_(parameter, -bound, bound)

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


class GatedLayers(RecurrentInterface, GatedRecurrentStack):
    """Gated layers of one kind of cell over whole sequences; the arguments are those of torch's layer, and a spec.

    `place` is device and dtype of the parameters.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
        spec: GateSpec,
        place: dict[str, Any],
    ) -> None:
        for name, size in {"input_size": input_size, "hidden_size": hidden_size, "num_layers": num_layers}.items():
            check_size(name, size)
        super().__init__(input_size, hidden_size, num_layers, batch_first, bidirectional)
        self.bias = bias
        self.dropout = check_share("dropout", dropout)
        for number, suffix in enumerate(suffixes_of(num_layers, bidirectional)):
            size = input_size if number < self._directions else self._directions * hidden_size
            self._add_layer(suffix, size, hidden_size, bias, spec, place)
        self._reset_dense()

    @classmethod
    def _from_dense(cls, dense: nn.RNNBase, options: dict[str, Any]) -> Self:
        sizes = (dense.input_size, dense.hidden_size, dense.num_layers, dense.bias, dense.batch_first, dense.dropout)
        return cls(*sizes, dense.bidirectional, **like_dense(dense, options))._take_dense(dense)

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        both = ", bidirectional=True" if self.bidirectional else ""
        return (
            f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}, bias={self.bias}, "
            f"batch_first={self.batch_first}, dropout={self.dropout}{both}, {self._grid_repr()}"
        )

    def _run(self, rows: Tensor, segments: Segments, state: State) -> tuple[Tensor, State]:
        return self._run_stack(rows, segments, state, self.dropout)

    def plan(self, x: Tensor | PackedSequence, hx: LSTMState | Tensor | None = None) -> Plan:
        """Which path `forward` takes for this input now, and why."""
        return self._plan_stack(x.data if isinstance(x, PackedSequence) else x, hx, self.dropout)


class GatedCell(GatedRecurrentStack):
    """One step of a gated layer of one kind of cell; the arguments are those of torch's cell, and a spec."""

    def __init__(self, input_size: int, hidden_size: int, bias: bool, spec: GateSpec, place: dict[str, Any]) -> None:
        super().__init__()
        self.input_size = check_size("input_size", input_size)
        self.hidden_size = check_size("hidden_size", hidden_size)
        self.bias = bias
        self._add_layer("", input_size, hidden_size, bias, spec, place)
        self._reset_dense()

    @classmethod
    def _from_dense(cls, dense: nn.RNNCellBase, options: dict[str, Any]) -> Self:
        made = cls(dense.input_size, dense.hidden_size, dense.bias, **like_dense(dense, options))
        return made._take_dense(dense)

    def _step(self, x: Tensor, hx: Any) -> Any:
        """The new state, from x (N, input_size) or (input_size) and the old one."""
        check_rows(x, self.input_size)
        if x.dim() > 2:
            raise invalid(
                "input",
                expected=f"shape (batch, {self.input_size}) or ({self.input_size},)",
                got=tuple(x.shape),
                remedy=f"A cell makes one step; DynamicSparse{self.cell.name} runs sequences.",
            )
        shape = (*x.shape[:-1], self.hidden_size)
        state = self.cell.start(shape, x) if hx is None else self.cell.check(hx, shape)
        rows = x.reshape(-1, self.input_size)
        state = tuple(s.reshape(1, -1, self.hidden_size) for s in state)
        _, state = self._run_stack(rows, [(1, rows.shape[0])], state)
        return self.cell.give(tuple(s.view(shape) for s in state))

    def plan(self, x: Tensor, hx: LSTMState | Tensor | None = None) -> Plan:
        """Which path `forward` takes for this input now, and why."""
        return self._plan_stack(x, hx)

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return f"{self.input_size}, {self.hidden_size}, bias={self.bias}, {self._grid_repr()}"


def like_dense(dense: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """The options, with device and type of the dense layer where they don't say otherwise."""
    weight = next(dense.parameters())
    return {"device": weight.device, "dtype": weight.dtype, **options}
