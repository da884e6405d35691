"""Linear layers with norm gates on packed columns: scores, selection and product are one call."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockgate.errors import invalid
from blockgate.formats import Format, PackedWeight, get_format
from blockgate.formats.columns import IN_COLUMNS, pack_columns, unpack_columns
from blockgate.gates.norm import NormGate, column_norms
from blockgate.ops import native
from blockgate.ops.column_linear import column_linear
from blockgate.runtime.block_linear import GatedLinear, autocast_dtype, check_packed_input, moving_only
from blockgate.runtime.exporting import PACKED, refuse_onnx_export
from blockgate.runtime.plan import FUSED, NO_KERNELS, REFERENCE, Plan, Refusal

if TYPE_CHECKING:
    from typing_extensions import Self

    from blockgate.gates import Gate

__all__ = ["PackedColumnLinear", "has_columns"]


GPU_COLUMNS = Refusal("packed columns have kernels for the CPU only", "Keep the layer unpacked on a GPU.")


def has_columns(gate: Gate) -> bool:
    """Whether the blocks of a gate are single columns, chosen by their norms."""
    return type(gate) is NormGate and gate.grid.block[1] == 1


class PackedColumnLinear(nn.Module, GatedLinear):
    """DynamicSparseLinear with a norm gate and blocks of one column, packed for inference; made by `pack`.

    A row of the input reads the columns that it opens, each as one stream. With several rows, four at a time share what
    they read, so that a batch costs at most what a dense layer does.

    Args:
        weight: (out_features, in_features), or the other way round where `transposed`; copied, and not kept.
        bias: (out_features) or None; copied.
        gate: the gate of the layer; copied.
        dtype: a format of `blockgate.formats`, by name, or as the torch dtype of that name.
        transposed: whether the layer stores its weight as (in_features, out_features); so do its checkpoints.
    """

    columns: Tensor
    scale: Tensor
    norms: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        gate: Gate,
        dtype: str | torch.dtype | Format,
        *,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.grid, self._transposed = gate.grid, transposed
        self.format = get_format(IN_COLUMNS.get(get_format(dtype).name, get_format(dtype).name))
        self.gate: Gate = copy.deepcopy(gate).float().requires_grad_(False).eval()
        weight = weight.t() if transposed else weight
        for name, value in self._stored(weight).items():
            self.register_buffer(name, value)
        copied = None if bias is None else nn.Parameter(bias.detach().float().clone(), requires_grad=False)
        self.register_parameter("bias", copied)
        self._sizes = [self.grid.out_features, self.grid.in_features, *self.grid.block]

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are stored as."""
        return self.columns.dtype

    def forward(self, x: Tensor) -> Tensor:
        """y (..., out_features) for x (..., in_features), in the type of x; computed in float32."""
        self._check_input(x)
        refuse_onnx_export("a packed layer", PACKED)
        rows = x.detach().reshape(-1, self.in_features).float()
        gate = self.gate
        y: Tensor = column_linear(
            rows, self.columns, self.scale, self.bias, self.norms, self._sizes, gate.open_blocks, self.format.name
        )
        return y.to(autocast_dtype(x.device.type) or x.dtype).view(*x.shape[:-1], self.out_features)

    def weight(self) -> Tensor:
        """The weight (out_features, in_features) in float32 that the columns stand for."""
        return unpack_columns(PackedWeight(self.columns, self.scale), self.grid, self.format.name)

    def gates(self, x: Tensor) -> Tensor:
        """The gates that x (..., in_features) gets: (..., out_blocks, in_blocks), 0 where closed."""
        self.gate.norms = self.norms
        return super().gates(x.float())

    def plan(self, x: Tensor) -> Plan:
        """Which path `forward` takes for x: one op, native where kernels are."""
        if x.is_cpu and native.unavailable_reason() is None:
            return Plan(FUSED)
        if not x.is_cpu:
            return Plan(REFERENCE, *GPU_COLUMNS)
        return Plan(REFERENCE, *NO_KERNELS)

    def train(self, mode: bool = True) -> Self:  # noqa: ARG002
        """Packed layers are for inference: they stay in eval mode, whatever the model around them does."""
        return super().train(False)

    def extra_repr(self) -> str:
        """The sizes, for print(model)."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{self.format.name} columns"
        )

    def _stored(self, weight: Tensor) -> dict[str, Tensor]:
        self.format.check_weight(weight)
        packed = pack_columns(weight, self.grid, self.format.name)
        return {"columns": packed.blocks, "scale": packed.scale, "norms": column_norms(weight, self.grid).float()}

    def _check_input(self, x: Tensor) -> None:
        check_packed_input(x, self.in_features, self.columns)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return super()._apply(moving_only(fn), recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A checkpoint of the unpacked layer has `weight`: pack it, and go on as if it had been saved packed.
        weight = state_dict.pop(prefix + "weight", None)
        weight = weight.t() if weight is not None and self._transposed else weight
        shape = (self.out_features, self.in_features)
        if weight is not None and weight.shape != shape:
            args[-1].append(f"size mismatch for {prefix}weight: expected {shape}, got {tuple(weight.shape)}.")
        elif weight is not None:
            state_dict.update({prefix + name: value for name, value in self._stored(weight).items()})
        columns = state_dict.get(prefix + "columns")
        if columns is not None and columns.dtype != self.dtype:
            raise invalid(
                f"{prefix}columns",
                expected=f"{self.dtype}, as this model was packed to",
                got=columns.dtype,
                remedy="Pack the model to the format of the checkpoint before loading.",
            )
        super()._load_from_state_dict(state_dict, prefix, *args)
