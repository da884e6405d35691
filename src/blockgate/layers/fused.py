"""Inference in one native call: packed copies of weights that are never stale, and the call itself."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from blockgate.gating import TopKGate
from blockgate.ops import native
from blockgate.ops.packed import dynamic_linear, pack_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from blockgate.gating import Gate
    from blockgate.grid import BlockGrid

__all__ = ["FusedLinear", "PackedWeight", "Renewed", "fits_fused_op", "has_fused_op", "pack_weight"]


Value = TypeVar("Value")


class PackedWeight(NamedTuple):
    """Blocks and scales as `pack_blocks` makes them."""

    blocks: Tensor
    scale: Tensor


class Renewed(Generic[Value]):
    """A value made from tensors on first use, and made again when one of them has changed since.

    A change is another tensor, other memory, or a higher version counter; `drop` covers what leaves none of these
    traces. Copies and pickles start empty. Threads may race to make the value: each gets a right one.
    """

    def __init__(self) -> None:
        self._state: tuple[list[tuple[int, int]], list[weakref.ref[Tensor]], Value | None] | None = None

    def get(self, sources: Iterable[Tensor | None], make: Callable[[], Value | None]) -> Value | None:
        """The value for these sources, from `make` if it isn't there or is stale; None if they can't be followed."""
        present = [t for t in sources if t is not None]
        try:
            marks = [(t.data_ptr(), t._version) for t in present]
        except RuntimeError:  # an inference tensor has no version counter
            return None
        state = self._state
        if state is not None and state[0] == marks and all(map(_is_same, state[1], present)):
            return state[2]
        value = make()
        self._state = (marks, [weakref.ref(t) for t in present], value)
        return value

    def drop(self) -> None:
        """Forgets the value."""
        self._state = None

    def __reduce__(self) -> tuple[type[Renewed[Any]], tuple[()]]:
        return Renewed, ()


def _is_same(reference: weakref.ref[Tensor], tensor: Tensor) -> bool:
    return reference() is tensor


def pack_weight(weight: Tensor, grid: BlockGrid, dtype: torch.dtype) -> PackedWeight:
    """A weight (m, n) as packed blocks of `dtype`."""
    return PackedWeight(*pack_blocks(weight.detach().float(), *grid.block, dtype))


class FusedLinear:
    """Packed weights with everything else that the fused op needs and that stays the same from call to call.

    Args:
        packed: the weight of the layer.
        gate: its gate, whose weights are packed here, each as one block of float32.
        grid: its block grid.
    """

    def __init__(self, packed: PackedWeight, gate: TopKGate, grid: BlockGrid) -> None:
        gate_weight, hidden_weight = (
            None if w is None else pack_blocks(w.detach().float(), *w.shape, torch.float32)[0]
            for w in (gate.weight, gate.hidden_weight)
        )
        self.packed = packed
        self.gate = gate
        self.gate_weight = gate_weight
        self.hidden_weight = hidden_weight
        self.in_features, self.out_features = grid.in_features, grid.out_features
        self.sizes = (gate.key_offset, gate.key_size, gate.num_scores, gate.hidden_size, grid.out_features, *grid.block)
        self.choice = (gate.groups, gate.normalise)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """y (..., m) for x (..., n): gate, selection and product in one call. Biases and sparsity are read anew."""
        # A parameter found in a module's own dict costs a tenth of one found through nn.Module.__getattr__.
        parameters = self.gate._parameters
        flat = x.dim() == 2
        y: Tensor = dynamic_linear(
            x if flat else x.reshape(-1, self.in_features),
            *self.packed,
            bias,
            self.gate_weight,
            parameters["bias"],
            self.hidden_weight,
            parameters["hidden_bias"],
            *self.sizes,
            self.gate.open_blocks,
            *self.choice,
        )
        return y if flat else y.view(*x.shape[:-1], self.out_features)


def has_fused_op(gate: Gate) -> bool:
    """Whether the fused op exists here and knows this kind of gate."""
    return isinstance(gate, TopKGate) and gate.backend != "reference" and native.unavailable_reason() is None


def fits_fused_op(x: Tensor, in_features: int) -> bool:
    """Whether the fused op can take this input now: float32 on the CPU; no gradient, tracing or autocast under way.

    Runs before every small product, so the cheap and the likely refusals come first.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and type(x) is Tensor
        and x.dtype is torch.float32
        and x.is_cpu
        and x.dim() > 0
        and x.shape[-1] == in_features
        and not torch.is_autocast_enabled("cpu")
    )
