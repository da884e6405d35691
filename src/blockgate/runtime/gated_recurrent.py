"""How the layers of a gated LSTM or GRU run: all in one native call, one op per layer, or step by step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from blockgate.gates import Gate
from blockgate.ops import check_device, gated_linear
from blockgate.ops.gated_gru import gated_gru
from blockgate.ops.gated_lstm import gated_lstm
from blockgate.runtime.block_linear import autocast_dtype, check_like
from blockgate.runtime.cells import LSTM, Cell, State
from blockgate.runtime.exporting import NO_FORM, refuse_onnx_export
from blockgate.runtime.follow import Followed, versions_refusal
from blockgate.runtime.plan import (
    BACKEND,
    FUSED,
    GRADIENTS,
    LAYER_DROPOUT,
    OPS,
    STATE_TYPE,
    STEPS,
    TRITON,
    Plan,
    Refusal,
    gate_refusal,
    gpu_refusal,
    input_refusal,
    memory_refusal,
    observing_refusal,
    shadow_refusal,
    slower_path,
    watcher_refusal,
    weights_refusal,
)
from blockgate.runtime.prepared import Prepared, PreparedLinear, copied_of, prepared_stack
from blockgate.runtime.recurrent import LayerRun, SegmentRun, Segments, run_layer, run_layers, step_by_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from blockgate.gates.topk import TopKGate
    from blockgate.grid import BlockGrid
    from blockgate.spec import GateSpec

__all__ = ["GatedMatrix", "RunnableRecurrence"]


class GatedMatrix(NamedTuple):
    """One of the matrices of a recurrent layer, with what belongs to it."""

    weight: Tensor
    bias: Tensor | None
    gate: Gate

    @property
    def grid(self) -> BlockGrid:
        """The cut of the weight."""
        return self.gate.grid

    def product(self, rows: Tensor) -> Tensor:
        """The gated product (R, gates * H) of rows (R, in)."""
        gates, indices = self.gate.decide(rows, self.weight)
        return gated_linear(rows, self.weight, self.bias, gates, indices, self.grid.block, backend=self.gate.backend)


class RunnableRecurrence(nn.Module):
    """One or more recurrent layers that can be run, told apart by the suffix of their names ("_l0", ... or none).

    What registers `weight_ih_l0`, `bias_ih_l0`, `gate_ih_l0`, ... is a layer in one direction; `_suffixes` lists what
    there is, both directions of a layer in turn.
    """

    cell: Cell
    bidirectional: bool = False

    def __init__(self) -> None:
        super().__init__()
        self._suffixes: list[str] = []
        self._copy: Followed[Prepared] = Followed()

    @property
    def spec(self) -> GateSpec:
        """The options of its first matrix as they are now; all matrices were made with the same."""
        return self._gates()[0].spec

    @property
    def backend(self) -> str:
        """Which code computes: see `GateSpec.backend`."""
        return self._gates()[0].backend

    def matrix(self, part: str, suffix: str = "") -> GatedMatrix:
        """The matrix for the input ("ih") or for the last state ("hh") of a layer, as it is now."""
        return GatedMatrix(*(getattr(self, f"{what}_{part}{suffix}") for what in ("weight", "bias", "gate")))

    def matrices(self) -> dict[str, GatedMatrix]:
        """All matrices, by the end of their parameters' names: "ih_l0", "hh_l0", ..."""
        return {part + suffix: self.matrix(part, suffix) for suffix in self._suffixes for part in ("ih", "hh")}

    def repack(self) -> None:
        """Forgets the packed copy of the weights, see `DynamicSparseLinear.repack`."""
        self._copy.drop()

    def train(self, mode: bool = True) -> Self:
        """As nn.Module.train; training gives back the memory of the packed copy."""
        if mode:
            self.repack()
        return super().train(mode)

    def _run_stack(self, rows: Tensor, segments: Segments, state: State, dropout: float = 0.0) -> tuple[Tensor, State]:
        """All layers over rows (R, in): output (R, D * H), last state (L * D, N, H)."""
        fused = self._fused(rows, state, dropout)
        if not isinstance(fused, Refusal):
            return fused.run(rows, segments, state)
        refuse_onnx_export("a gated recurrent layer", NO_FORM)
        weight = cast("Tensor", getattr(self, f"weight_ih{self._suffixes[0]}"))
        check_like(rows, weight)
        check_device(self.backend, rows.device.type)
        autocast = autocast_dtype(rows.device.type)
        rows = rows.to(weight.dtype)
        state = tuple(s.to(weight.dtype) for s in state)
        layers = [self._layer_run(number, segments) for number in range(len(self._suffixes))]
        directions = 2 if self.bidirectional else 1
        y, last = run_layers(rows, state, layers, directions, dropout if self.training else 0.0)
        # Under autocast the state to carry on keeps the parameters' precision.
        return y if autocast is None else y.to(autocast), last

    def _plan_stack(self, rows: Tensor, state: State | Tensor | None, dropout: float = 0.0) -> Plan:
        """Which path `_run_stack` takes for such rows now, and why; a state of None is one of zeros like the rows."""
        states = (state,) if isinstance(state, Tensor) else state or ()
        fused = self._fused(rows, states, dropout)
        if not isinstance(fused, Refusal):
            return Plan(FUSED, figures=fused.figures())
        on_gpu = [gpu_refusal(matrix.weight.dtype, matrix.gate) for matrix in self.matrices().values()]
        plan = slower_path(fused, rows, self.backend, on_gpu)
        recurrent = [self.matrix("hh", suffix).gate for suffix in self._suffixes]
        reasons = [_must_be_called(gate) for gate in recurrent]
        needs_calls = next((reason for reason in reasons if reason is not None), None)
        return Plan(STEPS, *needs_calls) if needs_calls is not None and plan.path == OPS else plan

    def _input_product(self, suffix: str) -> Callable[[Tensor], Tensor]:
        """The product of a layer's matrix for the input, with all rows at once."""
        matrix = self.matrix("ih", suffix)

        def product(rows: Tensor) -> Tensor:
            if matrix.gate.training:
                matrix.gate.observe(rows)
            return matrix.product(rows)

        return product

    def _layer_run(self, number: int, segments: Segments) -> LayerRun:
        """How a layer runs in one direction, op by op."""
        suffix = self._suffixes[number]
        gate = self.matrix("hh", suffix).gate

        def observe(output: Tensor) -> None:
            # What the gate of the recurrent matrix has decided on, but for the first state.
            if gate.training:
                gate.observe(output.detach())

        return partial(
            run_layer,
            segments=segments,
            product=self._input_product(suffix),
            recurrence=self._recurrence(suffix),
            backwards=self.bidirectional and number % 2 == 1,
            observe=observe,
        )

    def _recurrence(self, suffix: str) -> SegmentRun:
        """How the steps of a layer are run: all in one op, or, for gates that must be called, one by one."""
        recurrent = self.matrix("hh", suffix)
        if _must_be_called(recurrent.gate) is None:
            return partial(_all_steps, recurrent=recurrent, cell=self.cell)
        return partial(step_by_step, product=recurrent.product, cell=self.cell)

    def _fused(self, rows: Tensor, state: State, dropout: float) -> Prepared | Refusal:
        """The layers prepared for one native call, or what stands against it."""
        if torch.is_grad_enabled():
            return GRADIENTS
        if self.training and dropout:
            return LAYER_DROPOUT
        refusal = input_refusal(rows)
        if refusal is None and any(s.dtype is not torch.float32 for s in state):
            refusal = STATE_TYPE
        gates = self._gates()
        for gate in gates:
            refusal = refusal or watcher_refusal(gate) or observing_refusal(gate)
        refusal = refusal or shadow_refusal(self)
        if refusal is not None:
            return refusal
        objects: list[object] = [*self._parameters.values()]
        for gate in gates:
            objects += (type(gate), gate._spec, *gate._parameters.values(), *gate._buffers.values())
        return self._copy.get(tuple(objects), self._copied, self._prepare)

    def _copied(self) -> list[Tensor]:
        """The tensors that preparing the layers copies."""
        parameters = self._parameters
        return [t for name, gate in self._named_gates() for t in copied_of(parameters.get(f"weight_{name}"), gate)]

    def _prepare(self) -> Prepared | Refusal:
        names = [f"{what}_{name}" for name, _ in self._named_gates() for what in ("weight", "bias")]
        refusal = weights_refusal(self, names)
        for gate in self._gates():
            refusal = refusal or gate_refusal(gate)
        refusal = refusal or memory_refusal((*self.parameters(), *self.buffers())) or versions_refusal(self._copied())
        if refusal is not None:
            return refusal
        matrices = [PreparedLinear.copy_of(*matrix) for matrix in self.matrices().values()]
        return prepared_stack(self.cell, matrices, self.bidirectional)

    def _gates(self) -> list[Gate]:
        """All gates, in the order of `matrices`."""
        return [gate for _, gate in self._named_gates()]

    def _named_gates(self) -> list[tuple[str, Gate]]:
        """All gates, by the end of their matrix's name."""
        names = [f"{part}{suffix}" for suffix in self._suffixes for part in ("ih", "hh")]
        return [(name, cast("Gate", self._modules[f"gate_{name}"])) for name in names]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.repack()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        # Native code holds the biases: where loading swaps tensors, nobody else may.
        self.repack()
        super()._load_from_state_dict(*args)


def _must_be_called(gate: Gate) -> Refusal | None:
    """Why the recurrence must call a gate at every step; None if one op can compute it, in native code or not."""
    refusal = gate_refusal(gate)
    return None if refusal in {None, BACKEND, TRITON} else refusal


def _all_steps(sums: Tensor, state: State, recurrent: GatedMatrix, cell: Cell) -> tuple[Tensor, State]:
    """The recurrence of one layer in one op: sums (T, N, gates * H) of the input's products to output (T, N, H)."""
    gate = cast("TopKGate", recurrent.gate)
    network = gate.network()
    tensors: tuple[Any, ...] = (
        sums,
        *state,
        recurrent.weight,
        recurrent.bias,
        network.weight,
        network.bias,
        network.hidden_weight,
        network.hidden_bias,
    )
    options: dict[str, Any] = {
        "key_offset": gate.key_offset,
        "key_size": gate.key_size,
        "block": recurrent.grid.block,
        "open_blocks": gate.open_blocks,
        "groups": gate.groups,
        "normalise": gate.normalise,
        "backend": gate.backend,
    }
    if cell is LSTM:
        output, c = gated_lstm(*tensors, **options)
        return output, (output[-1], c)
    output = gated_gru(*tensors, **options)
    return output, (output[-1],)
