"""A transformer's MLP with one gate on its hidden channels: what is closed is neither computed nor read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from blockgate.errors import invalid
from blockgate.gates import Gate, make_gate
from blockgate.grid import as_int, check_size
from blockgate.runtime.paired import PairedLinear, RunnableMLP, check_activation
from blockgate.spec import GateSpec

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["HIDDEN_BLOCK", "DynamicSparseMLP"]

# Hidden channels of a block where nothing is said.
HIDDEN_BLOCK = 32


class DynamicSparseMLP(RunnableMLP):
    """A transformer's MLP whose hidden channels are cut into blocks, with one gate that opens some for each input.

    With a gate g for every hidden channel (the value of its block, 0 where closed), f the activation:

        y = down (g * f(up x)),  or with `glu`  y = down (g * f(gate_proj x) * (up x)),  biases included

    One decision saves rows of the up (and gate) projection and columns of the down projection. A closed channel counts
    as 0, whatever its bias, and whatever f(0) is. With all gates 1 it is the dense MLP.

    Args:
        in_features: size of the last dimension of the input.
        hidden_features: hidden channels.
        out_features: size of the last dimension of the output; in_features if None.
        bias: whether the projections have biases.
        activation: "gelu", "gelu_tanh", "relu", "silu", or an elementwise module.
        glu: whether there is a projection `gate_proj` whose activation is multiplied with `up`, as in a SwiGLU.
        dropout: of hidden channels, in training.
        spec: the options below as one object; options that are given too take the place of its own.
        device: of the parameters.
        dtype: of the parameters.
        block_size: hidden channels of a block, one int; 32. The last block may be smaller.
        sparsity: share of hidden blocks that stay closed, in [0, 1); 0.5. May be changed at any time.
        gate: a kind that chooses among all blocks: "margin" (if unset), "topk", "eq1", "softmax_sum" or "sigmoid".
        key_size, key_offset, gate_hidden, normalise, near_dense, backend: as in `DynamicSparseLinear`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        *,
        activation: str | nn.Module = "gelu",
        glu: bool = False,
        dropout: float = 0.0,
        spec: GateSpec | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        inputs, hidden = check_size("in_features", in_features), check_size("hidden_features", hidden_features)
        outputs = inputs if out_features is None else check_size("out_features", out_features)
        place = {"device": device, "dtype": dtype}

        def matrix(rows: int, columns: int) -> PairedLinear:
            weight = nn.Parameter(torch.empty(rows, columns, **place))  # type: ignore[arg-type]
            return PairedLinear(weight, nn.Parameter(torch.empty(rows, **place)) if bias else None)  # type: ignore[arg-type]

        gate_proj = matrix(hidden, inputs) if glu else None
        self._set_up(matrix(hidden, inputs), matrix(outputs, hidden), gate_proj, activation, dropout, spec, options)
        self._reset_matrices()

    @classmethod
    def around(
        cls,
        up: PairedLinear,
        down: PairedLinear,
        gate_proj: PairedLinear | None = None,
        *,
        activation: str | nn.Module,
        dropout: float = 0.0,
        training: bool = True,
        spec: GateSpec | None = None,
        **options: Any,
    ) -> Self:
        """One that computes with trained matrices, which stay where they are in a model; its gates start near 1.

        Args:
            up: (hidden, in), with its place in the model; the MLP refers to it and doesn't own it. So the next two.
            down: (out, hidden).
            gate_proj: (hidden, in), or None.
            activation: as for the class.
            dropout: as for the class.
            training: the mode to start in.
            spec: as for the class.
            options: as for the class.
        """
        made = cls.__new__(cls)
        RunnableMLP.__init__(made)
        made._set_up(up, down, gate_proj, activation, dropout, spec, options, owned=False)
        made.gate.reset_near_dense(up.matrix())
        return made.train(training)

    def reset_parameters(self) -> None:
        """Fresh weights: nn.Linear's, and those of the gate."""
        self._reset_matrices()
        self.gate.reset_parameters()

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        activation = self.activation if isinstance(self.activation, str) else type(self.activation).__name__
        return (
            f"in_features={self.in_features}, hidden_features={self.hidden_features}, "
            f"out_features={self.out_features}, activation={activation}{', glu' if self.gate_proj else ''}, "
            f"block_size={self.grid.block[0]}, blocks={self.grid.num_blocks}, backend={self.backend}"
        )

    def _set_up(
        self,
        up: PairedLinear,
        down: PairedLinear,
        gate_proj: PairedLinear | None,
        activation: str | nn.Module,
        dropout: float,
        spec: GateSpec | None,
        options: dict[str, Any],
        owned: bool = True,
    ) -> None:
        for name, part in (("up", up), ("down", down), ("gate_proj", gate_proj)):
            if owned:
                setattr(self, name, part)
            else:
                # Not registered: the matrix has its own place in the model.
                self.__dict__[name] = part
        self.activation = check_activation(activation)
        if not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
            raise invalid("dropout", expected="a number in [0, 1)", got=dropout, remedy="0 drops nothing.")
        self.dropout = float(dropout)
        self.outputs, self.matrices_of_input = down.out_features, 1 if gate_proj is None else 2
        spec = self._spec_of(spec, options, up.in_features)
        self.grid = spec.grid(up.out_features, up.in_features)
        self.gate: Gate = make_gate(spec, self.grid, device=up.weight.device, dtype=up.weight.dtype)
        if self.gate.kind == "norm" or getattr(self.gate, "groups", 1) > 1:
            raise invalid(
                "gate and select",
                expected="a gate that chooses among all hidden blocks",
                got=f"gate={self.gate.kind!r}, select={spec.select!r}: every block is a row of its own",
                remedy="Leave both unset.",
            )

    @staticmethod
    def _spec_of(spec: GateSpec | None, options: dict[str, Any], inputs: int) -> GateSpec:
        """The spec, with blocks of so many hidden channels by all inputs."""
        given = options.get("block_size", HIDDEN_BLOCK if spec is None else spec.block_size)
        if isinstance(given, (tuple, list)) and len(given) == 2 and as_int(given[1]) == inputs:
            given = given[0]
        if as_int(given) is None:
            raise invalid(
                "block_size",
                expected=f"one int, the hidden channels of a block, or (that, {inputs})",
                got=given,
                remedy="Leave it out for 32.",
            )
        return GateSpec.of(spec, {**options, "block_size": (check_size("block_size", given), inputs)})

    def _reset_matrices(self) -> None:
        """Weights and biases as nn.Linear starts them."""
        for part in filter(None, (self.up, self.down, self.gate_proj)):
            bound = 1 / math.sqrt(part.in_features)
            nn.init.uniform_(part.weight, -bound, bound)
            if part.bias is not None:
                nn.init.uniform_(part.bias, -bound, bound)
