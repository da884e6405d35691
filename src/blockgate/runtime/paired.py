"""How a paired MLP runs: one gate decides, and both products compute its open blocks only."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockgate.errors import invalid
from blockgate.grid import BlockGrid
from blockgate.ops import check_device, gated_linear
from blockgate.ops.gpu import runs_kernels
from blockgate.runtime.block_linear import GatedLinear, autocast_dtype, check_like, check_rows
from blockgate.runtime.exporting import EXPORTABLE, refuse_onnx_export
from blockgate.runtime.plan import GRADIENTS, Plan, Refusal, gpu_refusal, input_refusal, slower_path

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ACTIVATIONS", "PairedLinear", "PairedMLP", "RunnableMLP", "name_of_activation"]

# The activations that native code knows too, by name.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}

UNPACKED = Refusal("paired layers run in one native call only when packed", "For inference: bg.pack(model).")


def name_of_activation(function: Callable[[Tensor], Tensor]) -> str | None:
    """Which of `ACTIVATIONS` a function is, by its values: libraries have classes of their own for each."""
    points = torch.linspace(-8, 8, 257, dtype=torch.float64)
    try:
        with torch.no_grad():
            values = function(points.clone())
    except Exception:
        return None
    if not isinstance(values, Tensor) or values.shape != points.shape:
        return None
    return next((name for name, known in ACTIVATIONS.items() if torch.allclose(values, known(points), atol=1e-7)), None)


class PairedLinear(nn.Module):
    """Weight and bias of one matrix of a paired MLP, where the dense layer had them; the MLP computes with them.

    A call passes on its input, or the number 1 for a matrix whose output the model multiplies by, since the MLP has
    done its work.

    Args:
        weight: (out_features, in_features), or the other way round where `transposed`.
        bias: (out_features) or None.
        transposed: whether the weight is stored as (in_features, out_features).
        multiplies: whether it is the matrix whose output is multiplied with the activation, as in a SwiGLU.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        *,
        transposed: bool = False,
        multiplies: bool = False,
    ) -> None:
        super().__init__()
        self.weight, self.transposed, self.multiplies = weight, transposed, multiplies
        self.register_parameter("bias", bias)

    @property
    def in_features(self) -> int:
        """Columns of the matrix."""
        return self.weight.shape[0 if self.transposed else 1]

    @property
    def out_features(self) -> int:
        """Rows of the matrix."""
        return self.weight.shape[1 if self.transposed else 0]

    def matrix(self) -> Tensor:
        """The weight as (out_features, in_features)."""
        return self.weight.t() if self.transposed else self.weight

    def forward(self, x: Tensor) -> Tensor:
        """x, or 1."""
        return x.new_ones(()) if self.multiplies else x

    def extra_repr(self) -> str:
        """The sizes, for print(model)."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class PairedMLP(GatedLinear):
    """What paired MLPs share, packed or not: sizes and grids. Mixed into an nn.Module that has a gate.

    The gate's grid is that of the up matrix: one column of blocks, each as wide as the input. The down matrix has one
    row of blocks, with the same numbers.
    """

    outputs: int
    matrices_of_input: int

    @property
    def out_features(self) -> int:
        """Size of the last dimension of the output."""
        return self.outputs

    @property
    def hidden_features(self) -> int:
        """Hidden channels."""
        return self.grid.out_features

    @property
    def down_grid(self) -> BlockGrid:
        """The cut of the down matrix: columns of blocks with the numbers of the gate's blocks."""
        return BlockGrid(self.outputs, self.grid.out_features, (self.outputs, self.grid.block[0]))

    @property
    def macs_dense(self) -> int:
        """Multiply-adds of a row with every block open and no gate."""
        return self.grid.out_features * (self.matrices_of_input * self.grid.in_features + self.outputs)

    def gates(self, x: Tensor) -> Tensor:
        """The gates that x (..., in_features) gets: (..., blocks), 0 where closed."""
        return super().gates(x).squeeze(-1)


class RunnableMLP(nn.Module, PairedMLP):
    """A module with `up`, `down`, `gate` and perhaps `gate_proj` that can be called; what makes them is a layer."""

    up: PairedLinear
    down: PairedLinear
    gate_proj: PairedLinear | None
    activation: str | nn.Module
    dropout: float

    def forward(self, x: Tensor) -> Tensor:
        """y (..., out_features) for x (..., in_features), at the cost of the hidden blocks that x opens."""
        self._check_input(x)
        refuse_onnx_export("a gated layer", EXPORTABLE)
        rows = x.reshape(-1, self.in_features)
        weights = [part.matrix() for part in self.parts()]
        autocast = autocast_dtype(x.device.type)
        if autocast is not None:
            # The gate stays in the parameters' precision, so that it opens the same blocks.
            rows = rows.to(weights[0].dtype)
        if self.gate.training:
            self.gate.observe(rows)
        gates, indices = self.gate.decide(rows, weights[0])
        if autocast is not None and runs_kernels(self.backend, x.device.type):
            rows, weights = rows.to(autocast), [weight.to(autocast) for weight in weights]
        # Hidden channels are computed where the gate is open, and the gate itself counts once, on their way down.
        opened = (gates != 0).to(gates.dtype)
        block, backend = self.grid.block, self.backend

        def hidden_of(part: PairedLinear, weight: Tensor) -> Tensor:
            return gated_linear(rows, weight, part.bias, opened, indices, block, backend=backend)

        if self.gate_proj is None:
            hidden = self._activate(hidden_of(self.up, weights[0]))
        else:
            hidden = self._activate(hidden_of(self.gate_proj, weights[2])) * hidden_of(self.up, weights[0])
        hidden = F.dropout(hidden, self.dropout, self.training)
        y = gated_linear(hidden, weights[1], self.down.bias, gates, indices, self.down_grid.block, backend=backend)
        if autocast is not None:
            y = y.to(autocast)
        return y.view(*x.shape[:-1], self.outputs)

    def parts(self) -> list[PairedLinear]:
        """Its matrices: up, down and, where there is one, gate_proj."""
        return [part for part in (self.up, self.down, self.gate_proj) if part is not None]

    def plan(self, x: Tensor) -> Plan:
        """Which path `forward` takes for x now, and why: separate ops, since one native call needs packed blocks."""
        refusal = GRADIENTS if torch.is_grad_enabled() else input_refusal(x) or UNPACKED
        return slower_path(refusal, x, self.backend, [gpu_refusal(self.up.weight.dtype, self.gate)])

    def hidden(self, rows: Tensor) -> Tensor:
        """All hidden channels (N, H) in float32 for rows (N, in), as the dense MLP has them."""

        def product(part: PairedLinear) -> Tensor:
            return F.linear(rows.float(), part.matrix().float(), None if part.bias is None else part.bias.float())

        if self.gate_proj is None:
            return self._activate(product(self.up))
        return self._activate(product(self.gate_proj)) * product(self.up)

    def _activate(self, hidden: Tensor) -> Tensor:
        function = self.activation
        return ACTIVATIONS[function](hidden) if isinstance(function, str) else cast("Tensor", function(hidden))

    def _check_input(self, x: Tensor) -> None:
        check_rows(x, self.in_features)
        check_like(x, self.up.weight)
        check_device(self.backend, x.device.type)


def check_activation(activation: object) -> str | nn.Module:
    """The name of an activation, or a module of another one."""
    if isinstance(activation, nn.Module):
        return name_of_activation(activation) or activation
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise invalid(
            "activation",
            expected=f"one of {tuple(ACTIVATIONS)}, or a module",
            got=activation,
            remedy="Pass an elementwise module such as nn.Tanh() for another one.",
        )
    return activation
