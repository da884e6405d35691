"""Inference in one native call: packed copies of weights that are never stale, and the call itself."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from blockgate.gating import TopKGate
from blockgate.ops import native
from blockgate.ops.packed import dynamic_linear, pack_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from blockgate.gating import Gate
    from blockgate.grid import BlockGrid

__all__ = [
    "PackedGate",
    "PackedWeight",
    "Renewed",
    "fits_fused_op",
    "fused_linear",
    "has_fused_op",
    "pack_gate",
    "pack_weight",
]


class PackedWeight(NamedTuple):
    """Blocks and scales as `pack_blocks` makes them."""

    blocks: Tensor
    scale: Tensor


class PackedGate(NamedTuple):
    """The weights of a gate's layers, each packed as one block."""

    weight: Tensor
    hidden_weight: Tensor | None


class Renewed:
    """A value made from tensors on first use, and made again when one of them has changed since.

    A change is another tensor, other memory, or a higher version counter; `drop` covers what leaves none of these
    traces. Copies and pickles start empty. Threads may race to make the value: each gets a right one.
    """

    def __init__(self) -> None:
        self._state: tuple[list[tuple[int, int]], list[weakref.ref[Tensor]], Any] | None = None

    def get(self, sources: Sequence[Tensor], make: Callable[[], Any]) -> Any:
        """The value for these sources, from `make` if it isn't there or is stale; None if they can't be followed."""
        try:
            marks = [(t.data_ptr(), t._version) for t in sources]
        except RuntimeError:  # an inference tensor has no version counter
            return None
        state = self._state
        if state is not None and state[0] == marks and all(map(_is_same, state[1], sources)):
            return state[2]
        value = make()
        self._state = (marks, [weakref.ref(t) for t in sources], value)
        return value

    def drop(self) -> None:
        """Forgets the value."""
        self._state = None

    def __reduce__(self) -> tuple[type[Renewed], tuple[()]]:
        return Renewed, ()


def _is_same(reference: weakref.ref[Tensor], tensor: Tensor) -> bool:
    return reference() is tensor


def pack_weight(weight: Tensor, grid: BlockGrid, dtype: torch.dtype) -> PackedWeight:
    """A weight (m, n) as packed blocks of `dtype`."""
    return PackedWeight(*pack_blocks(weight.detach().float(), *grid.block, dtype))


def pack_gate(gate: Gate) -> PackedGate:
    """A gate's weights, each packed as one block of float32."""
    weight, hidden = (
        None if w is None else pack_blocks(w.detach().float(), *w.shape, torch.float32)[0]
        for w in (gate.weight, gate.hidden_weight)
    )
    assert weight is not None
    return PackedGate(weight, hidden)


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


def fused_linear(
    x: Tensor, packed: PackedWeight, bias: Tensor | None, gate: TopKGate, packed_gate: PackedGate, grid: BlockGrid
) -> Tensor:
    """y (..., m) for x (..., n): gate, selection and product in one call."""
    # A parameter found in a module's own dict costs a tenth of one found through nn.Module.__getattr__.
    gate_parameters = gate._parameters
    hidden = packed_gate.hidden_weight
    y: Tensor = dynamic_linear(
        x if x.dim() == 2 else x.reshape(-1, grid.in_features),
        packed.blocks,
        packed.scale,
        bias,
        packed_gate.weight,
        gate_parameters["bias"],
        hidden,
        None if hidden is None else gate_parameters["hidden_bias"],
        gate.key_offset,
        gate.key_size,
        gate.num_scores,
        gate.hidden_size,
        grid.out_features,
        *grid.block,
        gate.open_blocks,
        gate.groups,
        gate.normalise,
    )
    return y if x.dim() == 2 else y.view(*x.shape[:-1], grid.out_features)
