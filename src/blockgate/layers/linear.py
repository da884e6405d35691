"""A linear layer that computes, for every input, only the weight blocks that its gate opens."""

from __future__ import annotations

import math
from types import EllipsisType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from blockgate.errors import invalid
from blockgate.gates import Gate, make_gate
from blockgate.grid import BlockGrid
from blockgate.ops import check_backend, check_device, gated_linear
from blockgate.runtime.block_linear import GatedLinear, autocast_dtype, check_like, check_rows
from blockgate.runtime.prepared import FusedLinear, Renewed, fused_op_serves, pack_weight, usable

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from blockgate.gates import TopKGate

__all__ = ["DynamicSparseLinear"]


class DynamicSparseLinear(nn.Module, GatedLinear):
    """Drop-in for nn.Linear whose weight is cut into blocks, with a gate that opens some of them for each input.

    `weight` and `bias` have nn.Linear's names, shapes and meaning, so dense checkpoints load; the gate's parameters
    come in addition.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        bias: whether to add a bias.
        block_size: one int for square blocks, or (out, in). Ragged edges are fine.
        sparsity: share of blocks that stay closed, in [0, 1). May be changed at any time: `layer.sparsity = 0.75`.
        key_size: how many input features the gate reads. Unset: min(128, in_features); None: all of them.
        key_offset: the first feature the gate reads.
        gate_hidden: width of a hidden ReLU layer in the gate; None for none, as in the paper.
        gate: "topk", "eq1" (the paper's: topk with mean and global), "softmax_sum" or "sigmoid".
        normalise: of topk, what the gates are scaled to: "rms" 1 (if unset), "mean" 1, or "none".
        select: of topk, "per_row" opens as many in every row of blocks, "global" chooses among all. If unset, per row
            where a row has at least 4 blocks.
        backend: "auto", "reference", "cpu" or "triton"; a named one that can't run raises.
        device: of the parameters.
        dtype: of the parameters.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        block_size: int | tuple[int, int] = 128,
        sparsity: float = 0.5,
        key_size: int | EllipsisType | None = ...,
        key_offset: int = 0,
        gate_hidden: int | None = None,
        gate: str = "topk",
        normalise: str | None = None,
        select: str | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.grid = BlockGrid(out_features, in_features, block_size)
        self.backend = check_backend(backend)
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        )
        self.gate: Gate = make_gate(
            gate,
            self.grid,
            normalise=normalise,
            select=select,
            sparsity=sparsity,
            key_size=key_size,
            key_offset=key_offset,
            gate_hidden=gate_hidden,
            backend=backend,
            device=device,
            dtype=dtype,
        )
        self._packed: Renewed[FusedLinear] = Renewed()
        self._reset_linear()

    @classmethod
    def from_dense(cls, linear: nn.Module, **options: Any) -> Self:
        """A gated layer around a trained nn.Linear: the same Parameter objects, and gates that start near 1.

        Args:
            linear: the dense layer; its weight and bias are shared, not copied.
            options: the keyword options of this class (block_size, sparsity, key_size, ...).
        """
        if not isinstance(linear, nn.Linear) or "weight" not in linear._parameters:
            raise invalid(
                "from_dense",
                expected="an nn.Linear with a weight of its own",
                got=type(linear).__name__,
                remedy="Pass the layer itself, and remove parametrizations or pruning first.",
            )
        if "bias" in options:
            raise invalid("bias", expected="the dense layer's", got=options["bias"], remedy="Leave it out.")
        made = cls(
            linear.in_features,
            linear.out_features,
            bias=False,
            **{"device": linear.weight.device, "dtype": linear.weight.dtype, **options},
        )
        made.weight, made.bias = linear.weight, linear.bias  # type: ignore[assignment]
        made.gate.reset_near_dense()
        return made.train(linear.training)

    def reset_parameters(self) -> None:
        """Fresh weights: nn.Linear's, and those of the gate."""
        self._reset_linear()
        self.gate.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """y (..., out_features) for x (..., in_features), at the cost of the blocks that x opens."""
        gate = self._modules["gate"]
        if fused_op_serves(x, self, gate) and self.backend != "reference" and (fused := self._follow_weights(gate)):
            y = fused(x, cast("TopKGate", gate)._open_blocks)
            if y is not None:
                return y
        self._check_input(x)
        rows = x.reshape(-1, self.in_features)
        autocast = autocast_dtype(x.device.type)
        if autocast is not None:
            # Gate and product stay in the parameters' precision; only the result takes autocast's type.
            rows = rows.to(self.weight.dtype)
        gates, indices = self.gate(rows)
        y = gated_linear(rows, self._matrix(), self.bias, gates, indices, self.grid.block, backend=self.backend)
        if autocast is not None:
            y = y.to(autocast)
        return y.view(*x.shape[:-1], self.out_features)

    def repack(self) -> None:
        """Forgets the packed copy of the weights that inference without gradients makes on first use.

        Only needed after writing in ways that torch can't see: through `.data`, NumPy, a buffer that parameters are
        views of, or another process. The copy follows optimizer steps, `load_state_dict`, in-place edits and `.to()`.
        """
        self._packed.drop()

    def train(self, mode: bool = True) -> Self:
        """As nn.Module.train; training gives back the memory of the packed copy."""
        if mode:
            self.repack()
        return super().train(mode)

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        block_out, block_in = self.grid.block
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"block_size=({block_out}, {block_in}), blocks={self.grid.out_blocks}x{self.grid.in_blocks}, "
            f"backend={self.backend}"
        )

    def _matrix(self) -> Tensor:
        """The weight as (out_features, in_features), for layers that store it in another way."""
        return self.weight

    def _reset_linear(self) -> None:
        """Weight and bias as nn.Linear starts them."""
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def _follow_weights(self, gate: nn.Module | None) -> FusedLinear | None:
        """The layer prepared for the fused op, anew when anything of it has changed; None if it can't be."""
        weight = self._parameters.get("weight")
        # A weight that is shadowed for the moment (`weight_drop_`) is not the one to pack.
        if weight is None or gate is None or "weight" in self.__dict__:
            return None
        options = (id(gate), gate.key_offset, gate.key_size, gate.groups, gate.normalise)
        sources = (weight, self._parameters["bias"], *gate._parameters.values())
        return self._packed.get(sources, options, self._prepare)

    def _prepare(self) -> FusedLinear | None:
        if not usable((self.weight, self.bias, *self.gate.parameters())):
            return None
        packed = pack_weight(self._matrix(), self.grid, torch.float32)
        return FusedLinear(packed, self.bias, cast("TopKGate", self.gate), self.grid)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.repack()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _check_input(self, x: Tensor) -> None:
        check_rows(x, self.in_features)
        check_like(x, self.weight)
        check_device(self.backend, x.device.type)
