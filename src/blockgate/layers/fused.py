"""Inference in one native call: packed copies of weights that are never stale, and the call itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.optim.optimizer import register_optimizer_step_post_hook

from blockgate.gating import TopKGate
from blockgate.ops import native
from blockgate.ops.packed import dynamic_linear, pack_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from blockgate.gating import Gate
    from blockgate.grid import BlockGrid

__all__ = ["FusedLinear", "PackedWeight", "Renewed", "fused_op_serves", "pack_weight"]


Value = TypeVar("Value")


class PackedWeight(NamedTuple):
    """Blocks and scales as `pack_blocks` makes them."""

    blocks: Tensor
    scale: Tensor


class Renewed(Generic[Value]):
    """A value made from tensors on first use, and made again when one of them has changed since.

    A change is another tensor, other memory, a higher version counter, or a step of any optimizer (the fused ones leave
    no other trace); `drop` covers the rest. Copies and pickles start empty. Threads may race to make the value: each
    gets a right one.
    """

    def __init__(self) -> None:
        self._state: tuple[list[int], Value | None, list[Tensor]] | None = None

    def get(self, sources: Sequence[Tensor | None], make: Callable[[], Value | None]) -> Value | None:
        """The value for these sources, from `make` if it isn't there or is stale; None if they can't be followed."""
        marks = [_optimizer_steps[0]]
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


def pack_weight(weight: Tensor, grid: BlockGrid, dtype: torch.dtype) -> PackedWeight:
    """A weight (m, n) as packed blocks of `dtype`."""
    return PackedWeight(*pack_blocks(weight.detach().float(), *grid.block, dtype))


class FusedLinear:
    """A layer's weights, packed, ready for the fused op.

    Args:
        packed: the weight of the layer.
        gate: its gate, whose weights are packed here, each as one block of float32.
        grid: its block grid.
    """

    def __init__(self, packed: PackedWeight, gate: Gate, grid: BlockGrid) -> None:
        gate_weight, hidden_weight = (
            None if w is None else pack_blocks(w.detach().float(), *w.shape, torch.float32)[0]
            for w in (gate.weight, gate.hidden_weight)
        )
        self.packed = packed
        self.gate_weight = gate_weight
        self.hidden_weight = hidden_weight
        self.in_features, self.out_features = grid.in_features, grid.out_features
        self.sizes = (gate.num_scores, gate.hidden_size, grid.out_features, *grid.block)

    def __call__(self, x: Tensor, bias: Tensor | None, gate: TopKGate) -> Tensor | None:
        """y (..., m) for x (..., n): gate, selection and product in one call; None if x has another shape.

        All but the weights is read anew.
        """
        shape = x.shape
        if not shape or shape[-1] != self.in_features:
            return None
        flat = len(shape) == 2
        # A parameter found in a module's own dict costs a tenth of one found through nn.Module.__getattr__.
        parameters = gate._parameters
        y: Tensor = dynamic_linear(
            x if flat else x.reshape(-1, self.in_features),
            *self.packed,
            bias,
            self.gate_weight,
            parameters["bias"],
            self.hidden_weight,
            parameters["hidden_bias"],
            gate.key_offset,
            gate.key_size,
            *self.sizes,
            gate._open_blocks,
            gate.groups,
            gate.normalise,
        )
        return y if flat else y.view(*shape[:-1], self.out_features)


def fused_op_serves(x: Tensor, layer: nn.Module, gate: nn.Module | None) -> bool:
    """Whether the fused op may compute `layer` for this input now; otherwise the separate ops do.

    It needs float32 on the CPU; no gradient, tracing or autocast under way; a plain top-k gate that nobody hooks into;
    and ordinary parameters, which parametrized or pruned layers don't have. Runs before every small product, so it
    costs about a microsecond, and the likely refusals come first.
    """
    if torch.is_grad_enabled() or type(x) is not Tensor or type(gate) is not TopKGate:
        return False
    parameters, gate_parameters = layer._parameters, gate._parameters
    if "bias" not in parameters or "weight" not in gate_parameters or "bias" not in gate_parameters:
        return False
    bias, gate_bias = parameters["bias"], gate_parameters["bias"]
    return (
        x.dtype is torch.float32
        and x.is_cpu
        and (bias is None or (bias.dtype is torch.float32 and bias.is_cpu))
        and gate_bias.dtype is torch.float32  # type: ignore[union-attr]
        and x.layout is torch.strided
        and gate.backend != "reference"
        and not gate._forward_hooks
        and not gate._forward_pre_hooks
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and forward_ad._current_level < 0
        and native.unavailable_reason() is None
    )
