"""What linear layers on a block grid share, packed or not: sizes, sparsity, a look at their gates, input checks."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import forward_ad

from blockgate.errors import BlockgateError, invalid
from blockgate.ops.gpu import runs_kernels

if TYPE_CHECKING:
    from collections.abc import Callable

    from blockgate.gates import Gate
    from blockgate.grid import BlockGrid
    from blockgate.spec import GateSpec

__all__ = [
    "BlockLinear",
    "GatedLinear",
    "autocast_dtype",
    "check_like",
    "check_packed_input",
    "check_rows",
    "moving_only",
    "takes_halves",
]


class BlockLinear:
    """A linear layer whose weight has a block grid; mixed into an nn.Module."""

    grid: BlockGrid

    @property
    def in_features(self) -> int:
        """Size of the last dimension of the input."""
        return self.grid.in_features

    @property
    def out_features(self) -> int:
        """Size of the last dimension of the output."""
        return self.grid.out_features

    @property
    def backend(self) -> str:
        """Which code computes: see `GateSpec.backend`."""
        return "auto"


class GatedLinear(BlockLinear):
    """A linear layer with a gate over its block grid; mixed into an nn.Module that has both."""

    gate: Gate

    @property
    def spec(self) -> GateSpec:
        """Its options as they are now."""
        return self.gate.spec

    @property
    def backend(self) -> str:
        """Which code computes: see `GateSpec.backend`."""
        return self.gate.backend

    @property
    def sparsity(self) -> float:
        """Share of blocks that is to stay closed. Assign to change it, at any time."""
        return self.gate.target_sparsity

    @sparsity.setter
    def sparsity(self, sparsity: float) -> None:
        self.gate.target_sparsity = sparsity

    def gates(self, x: Tensor) -> Tensor:
        """The gates that x (..., in_features) gets: (..., out_blocks, in_blocks), 0 where closed."""
        self._check_input(x)
        gates = self.gate.dense(x.reshape(-1, self.in_features))
        return gates.view(*x.shape[:-1], self.grid.out_blocks, self.grid.in_blocks)

    @abstractmethod
    def _check_input(self, x: Tensor) -> None:
        """Raises a clear error if x doesn't fit this layer."""


def check_rows(x: Tensor, in_features: int) -> None:
    """Raises a clear error unless x is a dense floating tensor (..., in_features) without a forward-mode tangent."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided or not x.is_floating_point():
        what = f"{x.layout} of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise invalid("input", expected="a dense floating tensor", got=what, remedy="Convert it first.")
    if x.dim() == 0 or x.shape[-1] != in_features:
        raise invalid(
            "input",
            expected=f"shape (..., {in_features})",
            got=tuple(x.shape),
            remedy="The last dimension must be in_features.",
        )
    if not torch.compiler.is_compiling() and forward_ad.unpack_dual(x).tangent is not None:
        raise BlockgateError(
            "input: expected a tensor without a tangent, got one of forward-mode differentiation (torch.func.jvp, "
            "jacfwd or dual_level). Gated layers have reverse-mode gradients only."
        )


def check_like(x: Tensor, weight: Tensor) -> None:
    """Raises a clear error unless x is on the device of `weight`, and has its type where autocast doesn't choose it."""
    if x.device != weight.device:
        raise invalid(
            "input",
            expected=f"a tensor on {weight.device}, as the layer's weight",
            got=str(x.device),
            remedy="Move the input or the layer with .to(device).",
        )
    if x.dtype != weight.dtype and autocast_dtype(x.device.type) is None:
        raise invalid(
            "input",
            expected=f"{weight.dtype}, as the layer's weight",
            got=x.dtype,
            remedy="Convert the input or the layer with .to(dtype), or use torch.autocast.",
        )


def check_packed_input(x: Tensor, in_features: int, stored: Tensor) -> None:
    """Raises a clear error unless a packed layer, whose weights lie where `stored` does, can compute with x."""
    check_rows(x, in_features)
    if x.device != stored.device:
        raise invalid(
            "input",
            expected=f"a tensor on {stored.device}, as the layer's blocks",
            got=str(x.device),
            remedy="Move the input or the layer with .to(device).",
        )
    if torch.is_grad_enabled() and x.requires_grad:
        raise BlockgateError(
            "packed layer: expected an input without gradient, got one that requires it. Packed models are for "
            "inference: train the model it was packed from, or use torch.no_grad()."
        )


def moving_only(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`fn` where it moves a tensor, but not where it casts: kernels read the types that packing chose."""

    def move(t: Tensor) -> Tensor:
        moved = fn(t)
        return moved if moved.dtype == t.dtype else t.to(moved.device)

    return move


def takes_halves(dtype: torch.dtype, backend: str, device_type: str) -> bool:
    """Whether a product multiplies this type as it is: half precision, on the tensor cores of a GPU."""
    return dtype in {torch.float16, torch.bfloat16} and runs_kernels(backend, device_type)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The type that autocast gives results on this kind of device; None where it is off or unknown."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None
