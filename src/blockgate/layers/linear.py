"""A linear layer that computes, for every input, only the weight blocks that its gate opens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from blockgate.errors import invalid
from blockgate.gates import Gate, make_gate
from blockgate.runtime.linear import RunnableLinear
from blockgate.spec import GateSpec

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from blockgate.spec import GateOptions

__all__ = ["DynamicSparseLinear"]


class DynamicSparseLinear(RunnableLinear):
    """Drop-in for nn.Linear whose weight is cut into blocks, with a gate that opens some of them for each input.

    `weight` and `bias` have nn.Linear's names, shapes and meaning, so dense checkpoints load; the gate's parameters
    come in addition.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        bias: whether to add a bias.
        spec: the options below as one object; options that are given too take the place of its own.
        device: of the parameters.
        dtype: of the parameters.
        block_size: (out, in), or one int for square blocks; (256, 16). Ragged edges are fine.
        sparsity: share of blocks that stay closed, in [0, 1); 0.5. May be changed at any time: `layer.sparsity = 0.75`.
        key_size: how many input features the gate reads. Unset: min(128, in_features); None: all of them.
        key_offset: the first feature the gate reads; 0.
        gate_hidden: width of a hidden ReLU layer in the gate; None for none, as in the paper.
        gate: "margin" (if unset), "topk", "eq1" (the paper's: topk with mean and global), "norm" (no parameters),
            "softmax_sum" or "sigmoid".
        normalise: for topk, what the gates are scaled to: "rms" 1 (the default), "mean" 1, or "none".
        select: for margin and topk, "per_row" opens the same number in every row of blocks, "global" chooses among all
            blocks. If unset, "per_row" where rows have at least 4 blocks, else "global".
        near_dense: whether gates start near 1, for weights that were trained without gates; `from_dense` sets it.
        backend: "auto", "reference", "cpu" or "triton"; a named one that can't run raises.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        spec: GateSpec | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        super().__init__()
        spec = GateSpec.of(spec, options)
        self.grid = spec.grid(out_features, in_features)
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        )
        self.gate: Gate = make_gate(spec, self.grid, device=device, dtype=dtype)
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
        made.gate.reset_near_dense(made.weight)
        return made.train(linear.training)

    def reset_parameters(self) -> None:
        """Fresh weights: nn.Linear's, and those of the gate."""
        self._reset_linear()
        self.gate.reset_parameters()

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        block_out, block_in = self.grid.block
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"block_size=({block_out}, {block_in}), blocks={self.grid.out_blocks}x{self.grid.in_blocks}, "
            f"backend={self.backend}"
        )

    def _reset_linear(self) -> None:
        """Weight and bias as nn.Linear starts them."""
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)
