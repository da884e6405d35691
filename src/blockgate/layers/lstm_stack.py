"""Layers of a gated LSTM: their parameters under torch's names, a gate for each matrix, and the ways to run them."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from blockgate.gates import Gate, TopKGate, make_gate
from blockgate.grid import BlockGrid
from blockgate.ops import check_backend, check_device, gated_linear
from blockgate.ops.gated_lstm import gated_lstm
from blockgate.runtime.block_linear import autocast_dtype, check_like
from blockgate.runtime.prepared import FusedLinear, FusedLSTM, Renewed, for_inference, is_plain, pack_weight, usable
from blockgate.runtime.recurrent import LSTMState, SegmentRun, Segments, recur, run_layers, step_by_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

__all__ = ["GatedLSTMStack", "GatedMatrix"]


class GatedMatrix(NamedTuple):
    """One of the matrices of an LSTM, with what belongs to it."""

    weight: Tensor
    bias: Tensor | None
    gate: Gate

    @property
    def grid(self) -> BlockGrid:
        """The cut of the weight."""
        return self.gate.grid

    def product(self, rows: Tensor, backend: str) -> Tensor:
        """The gated product (R, 4H) of rows (R, in)."""
        gates, indices = self.gate(rows)
        return gated_linear(rows, self.weight, self.bias, gates, indices, self.grid.block, backend=backend)


class GatedLSTMStack(nn.Module):
    """One or more LSTM layers, told apart by the suffix of their parameters' names ("_l0", ... or none)."""

    def _start_stack(self, options: dict[str, Any]) -> None:
        self.backend = check_backend(options.get("backend", "auto"))
        self._suffixes: list[str] = []
        self._prepared: Renewed[FusedLSTM] = Renewed()

    def _add_layer(self, suffix: str, input_size: int, hidden_size: int, bias: bool, options: dict[str, Any]) -> None:
        """Registers the weights and biases of one more layer, still without values, and its gates."""
        options = {"block_size": 128, "sparsity": 0.5, "gate": "topk", **options}
        block_size, kind = options.pop("block_size"), options.pop("gate")
        place = {"device": options.get("device"), "dtype": options.get("dtype")}
        sizes = {"ih": input_size, "hh": hidden_size}
        for part, size in sizes.items():
            self.register_parameter(f"weight_{part}{suffix}", nn.Parameter(torch.empty(4 * hidden_size, size, **place)))
        for part in sizes:
            made = nn.Parameter(torch.empty(4 * hidden_size, **place)) if bias else None
            self.register_parameter(f"bias_{part}{suffix}", made)
        for part, size in sizes.items():
            gate = make_gate(kind, BlockGrid(4 * hidden_size, size, block_size), **options)
            self.add_module(f"gate_{part}{suffix}", gate)
        self._suffixes.append(suffix)

    def matrix(self, part: str, suffix: str = "") -> GatedMatrix:
        """The matrix for the input ("ih") or for the last state ("hh") of a layer, as it is now."""
        return GatedMatrix(*(getattr(self, f"{what}_{part}{suffix}") for what in ("weight", "bias", "gate")))

    def matrices(self) -> dict[str, GatedMatrix]:
        """All matrices, by the end of their parameters' names: "ih_l0", "hh_l0", ..."""
        return {part + suffix: self.matrix(part, suffix) for suffix in self._suffixes for part in ("ih", "hh")}

    def repack(self) -> None:
        """Forgets the packed copy of the weights, see `DynamicSparseLinear.repack`."""
        self._prepared.drop()

    def train(self, mode: bool = True) -> Self:
        """As nn.Module.train; training gives back the memory of the packed copy."""
        if mode:
            self.repack()
        return super().train(mode)

    def _run_stack(
        self, rows: Tensor, segments: Segments, state: LSTMState, dropout: float = 0.0
    ) -> tuple[Tensor, LSTMState]:
        """All layers over rows (R, in): output (R, H), last h and c (L, N, H)."""
        if not (self.training and dropout) and (fused := self._follow_weights(rows, state)):
            return recur(rows, segments, state, fused)
        weight = cast("Tensor", getattr(self, f"weight_ih{self._suffixes[0]}"))
        check_like(rows, weight)
        check_device(self.backend, rows.device.type)
        autocast = autocast_dtype(rows.device.type)
        rows = rows.to(weight.dtype)
        state = (state[0].to(weight.dtype), state[1].to(weight.dtype))
        layers = [(self._product(suffix), self._recurrence(suffix)) for suffix in self._suffixes]
        y, last = run_layers(rows, segments, state, layers, dropout if self.training else 0.0)
        # Under autocast the state to carry on keeps the parameters' precision.
        return y if autocast is None else y.to(autocast), last

    def _product(self, suffix: str) -> Callable[[Tensor], Tensor]:
        return partial(self.matrix("ih", suffix).product, backend=self.backend)

    def _recurrence(self, suffix: str) -> SegmentRun:
        """How the steps of a layer are run: all in one op, or, for gates that must be called, one by one."""
        recurrent = self.matrix("hh", suffix)
        gate = recurrent.gate
        if type(gate) is TopKGate and not gate._forward_hooks and not gate._forward_pre_hooks:
            return partial(_all_steps, recurrent=recurrent, backend=self.backend)
        return partial(step_by_step, product=partial(recurrent.product, backend=self.backend))

    def _follow_weights(self, rows: Tensor, state: LSTMState) -> FusedLSTM | None:
        """The layers prepared for the fused op, anew when anything of them has changed; None if it can't serve."""
        if self.backend == "reference" or not for_inference(rows) or any(s.dtype != torch.float32 for s in state):
            return None
        gates = self._gates()
        if not all(is_plain(gate) for gate in gates) or not self._parameters.keys().isdisjoint(self.__dict__):
            return None
        options = [x for gate in gates for x in (id(gate), gate.key_offset, gate.key_size, gate.groups, gate.normalise)]
        sources = [*self._parameters.values(), *(p for gate in gates for p in gate._parameters.values())]
        return self._prepared.get(sources, options, self._prepare)

    def _prepare(self) -> FusedLSTM | None:
        if not usable(self.parameters()):
            return None
        return FusedLSTM(
            [
                FusedLinear(pack_weight(m.weight, m.grid, torch.float32), m.bias, cast("TopKGate", m.gate), m.grid)
                for m in self.matrices().values()
            ],
            [m.gate for m in self.matrices().values()],
        )

    def _gates(self) -> list[Gate]:
        """All gates, in the order of `matrices`."""
        return [cast("Gate", self._modules[f"gate_{p}{suffix}"]) for suffix in self._suffixes for p in ("ih", "hh")]

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
        for gate in self._gates():
            gate.reset_near_dense()
        return self.train(dense.training)

    def _grid_repr(self) -> str:
        (block_out, block_in), grids = self._gates()[0].grid.block, [gate.grid for gate in self._gates()]
        blocks = ", ".join(f"{grid.out_blocks}x{grid.in_blocks}" for grid in grids)
        return f"block_size=({block_out}, {block_in}), blocks=({blocks}), backend={self.backend}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.repack()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def _all_steps(sums: Tensor, state: LSTMState, recurrent: GatedMatrix, backend: str) -> tuple[Tensor, LSTMState]:
    """The recurrence of one layer in one op: sums (T, N, 4H) of the input's products to output (T, N, H)."""
    gate = cast("TopKGate", recurrent.gate)
    output, c = gated_lstm(
        sums,
        *state,
        recurrent.weight,
        recurrent.bias,
        gate.weight,
        gate.bias,
        gate.hidden_weight,
        gate.hidden_bias,
        key_offset=gate.key_offset,
        key_size=gate.key_size,
        block=recurrent.grid.block,
        open_blocks=gate.open_blocks,
        groups=gate.groups,
        normalise=gate.normalise,
        backend=backend,
    )
    return output, (output[-1], c)
