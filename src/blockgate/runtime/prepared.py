"""Inference in one native call: packed copies of weights that are never stale, and the call itself."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.optim.optimizer import register_optimizer_step_post_hook

from blockgate.formats import Format, PackedWeight, get_format
from blockgate.gates import TopKGate
from blockgate.ops import native
from blockgate.ops.packed_linear import (
    pack_blocks,
    prepare_dynamic_linear,
    prepare_packed_linear,
    release_prepared_linear,
    run_prepared_linear,
    run_prepared_lstm,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from blockgate.grid import BlockGrid

__all__ = [
    "FusedDense",
    "FusedLSTM",
    "FusedLinear",
    "Renewed",
    "for_inference",
    "fused_op_serves",
    "is_plain",
    "pack_weight",
    "usable",
]


Value = TypeVar("Value")


class Renewed(Generic[Value]):
    """A value made from tensors on first use, and made again when one of them has changed since.

    A change is another tensor, other memory, a higher version counter, or a step of any optimizer (the fused ones leave
    no other trace); `drop` covers the rest. Copies and pickles start empty. Threads may race to make the value: each
    gets a right one.
    """

    def __init__(self) -> None:
        self._state: tuple[list[Any], Value | None, list[Tensor]] | None = None

    def get(
        self, sources: Sequence[Tensor | None], options: Sequence[Any], make: Callable[[], Value | None]
    ) -> Value | None:
        """The value for these sources and options, from `make` if it isn't there or is stale.

        None if the sources can't be followed, or `make` finds nothing to make of them.
        """
        marks = [_optimizer_steps[0], *options]
        try:
            for t in sources:
                if t is not None:
                    marks += (id(t), t.data_ptr(), t._version)
        except RuntimeError:  # an inference tensor has no version counter
            return None
        state = self._state
        if state is not None and state[0] == marks:
            return state[1]
        value = make()
        # Holding the memory keeps its address from being given to another tensor.
        self._state = (marks, value, [t.detach() for t in sources if t is not None])
        return value

    def drop(self) -> None:
        """Forgets the value."""
        self._state = None

    def __reduce__(self) -> tuple[type[Renewed[Any]], tuple[()]]:
        return Renewed, ()


_optimizer_steps = [0]


def _count_step(*_: Any) -> None:
    _optimizer_steps[0] += 1


register_optimizer_step_post_hook(_count_step)


def pack_weight(weight: Tensor, grid: BlockGrid, stored_as: str | torch.dtype | Format) -> PackedWeight:
    """A weight (m, n) in some format."""
    return PackedWeight(*pack_blocks(weight.detach().float(), grid.block, get_format(stored_as).name))


class FusedDense:
    """A packed layer prepared for native calls, its arguments checked once; every block is open.

    Args:
        packed: its weight.
        bias: (m) or None; read anew on every call.
        grid: the cut of the weight.
        stored_as: the name of the weight's format.
    """

    def __init__(self, packed: PackedWeight, bias: Tensor | None, grid: BlockGrid, stored_as: str = "float32") -> None:
        self.in_features, self.out_features, self.stored_as = grid.in_features, grid.out_features, stored_as
        self.handle = self._prepare(packed, bias, grid)
        weakref.finalize(self, release_prepared_linear, self.handle).atexit = False

    def _prepare(self, packed: PackedWeight, bias: Tensor | None, grid: BlockGrid) -> int:
        return prepare_packed_linear(  # type: ignore[no-any-return]
            *packed, bias, [grid.out_features, grid.in_features, *grid.block], self.stored_as
        )

    def __call__(self, x: Tensor, open_blocks: int = 1) -> Tensor | None:
        """y (..., m) for x (..., n) in one call; None if x has another shape. Without a gate, all blocks are open."""
        shape = x.shape
        if not shape or shape[-1] != self.in_features:
            return None
        if len(shape) == 2:
            return run_prepared_linear(x, self.handle, open_blocks)  # type: ignore[no-any-return]
        y: Tensor = run_prepared_linear(x.reshape(-1, self.in_features), self.handle, open_blocks)
        return y.view(*shape[:-1], self.out_features)


class FusedLinear(FusedDense):
    """A layer prepared with its gate: gate, selection and product in one call.

    Args:
        packed: the weight of the layer.
        bias: (m) or None; read anew on every call, as are the gate's biases.
        gate: its gate, whose weights are packed here, each as one block of float32.
        grid: its block grid.
        stored_as: the name of the weight's format.
    """

    def __init__(
        self, packed: PackedWeight, bias: Tensor | None, gate: TopKGate, grid: BlockGrid, stored_as: str = "float32"
    ) -> None:
        self.gate = gate
        super().__init__(packed, bias, grid, stored_as)

    def _prepare(self, packed: PackedWeight, bias: Tensor | None, grid: BlockGrid) -> int:
        gate = self.gate
        gate_weight, hidden_weight = (
            None if w is None else pack_blocks(w.detach().float(), w.shape, "float32")[0]
            for w in (gate.weight, gate.hidden_weight)
        )
        return prepare_dynamic_linear(  # type: ignore[no-any-return]
            *packed,
            bias,
            [grid.out_features, grid.in_features, *grid.block],
            self.stored_as,
            gate_weight,
            gate.bias,
            hidden_weight,
            gate.hidden_bias,
            [gate.key_offset, gate.key_size],
            gate.groups,
            gate.normalise,
        )


class FusedLSTM:
    """A stack of LSTM layers prepared to run over all their steps in one call.

    Args:
        matrices: the prepared matrices, for each layer the one of the input and the one of the last state.
        gates: the gate of each matrix, None where every block is open.
    """

    def __init__(self, matrices: Sequence[FusedDense], gates: Sequence[nn.Module | None]) -> None:
        self.matrices, self.gates = matrices, gates
        self.handles = [matrix.handle for matrix in matrices]

    def __call__(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Output (T, N, H) and last h and c (L, N, H), for x (T, N, in) and the state to start from."""
        open_blocks = [1 if gate is None else gate._open_blocks for gate in self.gates]
        y, h, c = run_prepared_lstm(x, *state, self.handles, open_blocks)
        return y, (h, c)


def fused_op_serves(x: Tensor, layer: nn.Module, gate: nn.Module | None) -> bool:
    """Whether the fused op may compute `layer` for this input now; otherwise the separate ops do.

    It needs an input for inference and a plain gate; and ordinary parameters, which parametrized or pruned layers don't
    have. Runs before every small product, so it costs about a microsecond, and the likely refusals come first.
    """
    return not torch.is_grad_enabled() and is_plain(gate) and "bias" in layer._parameters and for_inference(x)


def is_plain(gate: nn.Module | None) -> bool:
    """Whether native code may stand in for this gate: top-k, not bound to the reference, and hooked by nobody."""
    return (
        type(gate) is TopKGate
        and gate.backend != "reference"
        and not gate._forward_hooks
        and not gate._forward_pre_hooks
        and "weight" in gate._parameters
        and "bias" in gate._parameters
    )


def for_inference(x: Tensor) -> bool:
    """Whether x is float32 on the CPU with no gradient, tracing or autocast under way, and the kernels are there."""
    return (
        not torch.is_grad_enabled()
        and type(x) is Tensor
        and x.dtype is torch.float32
        and x.is_cpu
        and x.layout is torch.strided
        and not torch.compiler.is_compiling()
        # A trace, or a mode that watches ops, would keep the number of a prepared layer, which means nothing later.
        and not torch._C._is_tracing()
        and not torch._C._len_torch_dispatch_stack()
        and not torch.is_autocast_enabled("cpu")
        and forward_ad._current_level < 0
        and native.unavailable_reason() is None
    )


def usable(parameters: Iterable[Tensor | None]) -> bool:
    """Whether the fused op can read these as they are: each None, or contiguous float32 on the CPU."""
    return all(p is None or (p.dtype is torch.float32 and p.is_cpu and p.is_contiguous()) for p in parameters)
