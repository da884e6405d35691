"""Linear layers that hold nothing but packed blocks: what `pack` makes of a model, for inference."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from blockgate.changes import CountsChanges
from blockgate.errors import invalid
from blockgate.formats import Format, PackedWeight, get_format
from blockgate.grid import BlockGrid
from blockgate.ops.packed_linear import dense_packed_linear, unpack_blocks
from blockgate.ops.registry import variant
from blockgate.runtime.block_linear import (
    BlockLinear,
    GatedLinear,
    autocast_dtype,
    check_packed_input,
    moving_only,
    takes_halves,
)
from blockgate.runtime.exporting import PACKED, refuse_onnx_export
from blockgate.runtime.plan import (
    FUSED,
    GRADIENTS,
    Plan,
    Refusal,
    gate_refusal,
    gpu_refusal,
    input_refusal,
    memory_refusal,
    slower_path,
    watcher_refusal,
    weights_refusal,
)
from blockgate.runtime.prepared import PreparedLinear, pack_weight

if TYPE_CHECKING:
    from typing_extensions import Self

    from blockgate.gates import Gate
    from blockgate.gates.topk import TopKGate

__all__ = [
    "FORMAT_VERSION",
    "PackedBlocks",
    "PackedDynamicSparseLinear",
    "PackedLinear",
]

# Of the packed layout in checkpoints. Version 1 had one input to a line in every format, and is still read.
FORMAT_VERSION = 2

# How a plain nn.Linear is cut: int8 gets a scale for every 128 inputs.
DENSE_BLOCK = 128


class PackedBlocks(CountsChanges):
    """The packed blocks of one weight, as buffers; loads an unpacked weight too, and packs it again.

    Args:
        weight: (m, n), any floating type.
        grid: its block grid.
        stored_as: the format that the weight is packed to.
    """

    blocks: Tensor
    scale: Tensor
    version: Tensor

    def __init__(self, weight: Tensor, grid: BlockGrid, stored_as: Format) -> None:
        super().__init__()
        self.grid, self.format = grid, stored_as
        packed = _pack_checked(weight, grid, stored_as)
        self.register_buffer("blocks", packed.blocks)
        self.register_buffer("scale", packed.scale)
        self.register_buffer("version", torch.tensor(FORMAT_VERSION, device=weight.device))

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are stored as."""
        return self.blocks.dtype

    def weight(self) -> Tensor:
        """The weight (m, n) in float32 that the blocks stand for."""
        return cast("Tensor", unpack_blocks(self.blocks, self.scale, self.sizes, self.format.name))

    @property
    def sizes(self) -> list[int]:
        """The grid as ops take it: out_features, in_features, block_out, block_in."""
        return [self.grid.out_features, self.grid.in_features, *self.grid.block]

    def extra_repr(self) -> str:
        """For print(model)."""
        return f"{self.format.name}, blocks={self.grid.out_blocks}x{self.grid.in_blocks}"

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return super()._apply(moving_only(fn), recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        version = state_dict.get(prefix + "version")
        blocks = state_dict.get(prefix + "blocks")
        known = FORMAT_VERSION if version is None or version.is_meta else int(version)
        if known not in {1, FORMAT_VERSION}:
            raise invalid(
                f"{prefix}version",
                expected=f"packed format {FORMAT_VERSION} or 1",
                got=known,
                remedy="Pack the model again with this version of blockgate.",
            )
        if blocks is not None and blocks.dtype != self.dtype:
            raise invalid(
                f"{prefix}blocks",
                expected=f"{self.dtype}, as this model was packed to",
                got=blocks.dtype,
                remedy="Pack the model to the format of the checkpoint before loading.",
            )
        if blocks is not None and known == 1:
            if blocks.dim() == 4:
                state_dict[prefix + "blocks"] = self.format.of_version_1(blocks)
            state_dict[prefix + "version"] = torch.tensor(FORMAT_VERSION)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _pack_checked(weight: Tensor, grid: BlockGrid, stored_as: Format) -> PackedWeight:
    stored_as.check_weight(weight)
    return pack_weight(weight, grid, stored_as)


class PackedLinear(CountsChanges, BlockLinear):
    """nn.Linear on packed blocks, all of them open. For inference; made by `pack`.

    Packed layers are frozen: what is prepared for native calls is made once, and made again after an assignment, after
    loading and after `.to()`. Blocks and the layer's bias are read in place; edit the values of the gate by hand, and
    you have to call `repack()`.

    Args:
        weight: (out_features, in_features), or the other way round where `transposed`; copied, and not kept.
        bias: (out_features) or None; copied.
        dtype: a format of `blockgate.formats`, by name, or as the torch dtype of that name.
        grid: the cut of the weight; blocks of 128 if None.
        transposed: whether the layer stores its weight as (in_features, out_features); so do its checkpoints.
    """

    bias: nn.Parameter | None
    # What is prepared, or why nothing can be; and how often the layer and its parts had changed then.
    _prepared: tuple[PreparedLinear | Refusal | None, tuple[int, ...]]

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        dtype: str | torch.dtype | Format,
        grid: BlockGrid | None = None,
        *,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self._transposed = transposed
        weight = weight.t() if transposed else weight
        self.grid = grid or BlockGrid(weight.shape[0], weight.shape[1], DENSE_BLOCK)
        self.packed = PackedBlocks(weight, self.grid, get_format(dtype))
        copied = None if bias is None else nn.Parameter(bias.detach().float().clone(), requires_grad=False)
        self.register_parameter("bias", copied)
        self.repack()

    def forward(self, x: Tensor) -> Tensor:
        """y (..., out_features) for x (..., in_features), in the type of x; computed in float32, or half on a GPU."""
        fused = self._fused(x)
        if type(fused) is PreparedLinear and fused.fits(x):
            return fused(x)
        self._check_input(x)
        refuse_onnx_export("a packed layer", PACKED)
        dtype, rows = autocast_dtype(x.device.type) or x.dtype, x.reshape(-1, self.in_features)
        halves = takes_halves(dtype, self.backend, x.device.type) and self.gpu_refusal() is None
        y = self._product(rows.float(), rows.to(dtype) if halves else rows.float()).to(dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def plan(self, x: Tensor) -> Plan:
        """Which path `forward` takes for x now, and why."""
        fused = self._fused(x)
        if isinstance(fused, Refusal):
            return slower_path(fused, x, self.backend, [self.gpu_refusal()])
        return Plan(FUSED, figures=fused.figures(x))

    def gpu_refusal(self) -> Refusal | None:
        """What stands against GPU kernels for this layer."""
        return gpu_refusal(torch.float32, cast("Gate | None", self._modules.get("gate")), self.packed.format.name)

    def repack(self) -> None:
        """Forgets what is prepared for native calls; needed after editing the values of gate weights by hand."""
        self.__dict__["_prepared"] = (None, ())

    def prepared(self) -> PreparedLinear | Refusal:
        """The layer prepared for native calls, or why it can't be now."""
        changes = self._count_changes()
        prepared, known = self._prepared
        if prepared is None or known != changes:
            prepared = self._prepare()
            self.__dict__["_prepared"] = (prepared, changes)
        return prepared

    def _count_changes(self) -> tuple[int, ...]:
        """How often the layer and its parts have changed."""
        return self.changes, cast("PackedBlocks", self._modules["packed"]).changes

    def _fused(self, x: Tensor) -> PreparedLinear | Refusal:
        """The layer prepared for one native call with x, or what stands against it."""
        refusal = input_refusal(x)
        if refusal is None and x.requires_grad and torch.is_grad_enabled():
            refusal = GRADIENTS
        return refusal or self.prepared()

    def _prepare(self) -> PreparedLinear | Refusal:
        return self.prepared_with(cast("TopKGate | None", self._modules.get("gate")))

    def prepared_with(self, gate: Gate | None) -> PreparedLinear | Refusal:
        """The blocks prepared for native calls with a gate, or with all of them open; or why they can't be now."""
        blocks, scale, known = self.packed.blocks, self.packed.scale, cast("TopKGate | None", gate)
        refusal = weights_refusal(self, ("bias",)) or memory_refusal((self.bias, None if blocks.is_cpu else blocks))
        return refusal or PreparedLinear(PackedWeight(blocks, scale), self.bias, self.grid, self.packed.format, known)

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles prepare their own.
        return {**self.__dict__, "_prepared": (None, ())}

    def _product(self, rows: Tensor, factors: Tensor) -> Tensor:  # noqa: ARG002
        """y (N, out_features) by the op. A gate reads rows (N, in_features), the product the same ones as `factors`."""
        p = self.packed
        y: Tensor = dense_packed_linear(factors, p.blocks, p.scale, self.bias, p.sizes, p.format.name)
        return y

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.repack()
        return super()._apply(moving_only(fn), recurse)

    def extra_repr(self) -> str:
        """The sizes, for print(model)."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _check_input(self, x: Tensor) -> None:
        check_packed_input(x, self.in_features, self.packed.blocks)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Native code holds bias and blocks: where loading swaps tensors, nobody else may.
        self.repack()
        # A checkpoint of the unpacked layer has `weight`: pack it, and go on as if it had been saved packed.
        weight = state_dict.pop(prefix + "weight", None)
        weight = weight.t() if weight is not None and self._transposed else weight
        shape = (self.out_features, self.in_features)
        if weight is not None and weight.shape != shape:
            args[-1].append(f"size mismatch for {prefix}weight: expected {shape}, got {tuple(weight.shape)}.")
        elif weight is not None:
            packed = _pack_checked(weight, self.grid, self.packed.format)
            fresh = {"blocks": packed.blocks, "scale": packed.scale, "version": torch.tensor(FORMAT_VERSION)}
            state_dict.update({f"{prefix}packed.{name}": value for name, value in fresh.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)


class PackedDynamicSparseLinear(PackedLinear, GatedLinear):
    """DynamicSparseLinear on packed blocks: the gate stays float32, the weight is kept only in packed form.

    Args:
        weight: as for `PackedLinear`, and the next two.
        bias: (out_features) or None.
        gate: the gate of the layer; copied.
        dtype: a format of `blockgate.formats`, by name, or as the torch dtype of that name.
        transposed: as for `PackedLinear`.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        gate: Gate,
        dtype: str | torch.dtype | Format,
        *,
        transposed: bool = False,
    ) -> None:
        super().__init__(weight, bias, dtype, gate.grid, transposed=transposed)
        self.gate: Gate = copy.deepcopy(gate).float().requires_grad_(False).eval()
        _see_packed(self)
        self.register_load_state_dict_post_hook(_see_packed)  # type: ignore[no-untyped-call]

    def gates(self, x: Tensor) -> Tensor:
        """The gates that x (..., in_features) gets: (..., out_blocks, in_blocks), 0 where closed."""
        return super().gates(x.float())

    def train(self, mode: bool = True) -> Self:  # noqa: ARG002
        """Packed layers are for inference: they stay in eval mode, whatever the model around them does."""
        return super().train(False)

    def prepared(self) -> PreparedLinear | Refusal:
        """The layer prepared for native calls, or why it can't be now."""
        gate = cast("TopKGate", self._modules["gate"])
        return watcher_refusal(gate) or super().prepared()

    def _count_changes(self) -> tuple[int, ...]:
        modules = self._modules
        return self.changes, cast("PackedBlocks", modules["packed"]).changes, cast("Gate", modules["gate"]).changes

    def _prepare(self) -> PreparedLinear | Refusal:
        return gate_refusal(self.gate) or memory_refusal(self.gate.parameters()) or super()._prepare()

    def _product(self, rows: Tensor, factors: Tensor) -> Tensor:
        gates, indices = self.gate(rows)
        p, product = self.packed, variant("packed_linear", self.backend)
        y: Tensor = product(factors, p.blocks, p.scale, self.bias, gates, indices, p.sizes, p.format.name)
        return y


def _see_packed(layer: nn.Module, *_: object) -> None:
    """Tells the gate of the weight as it is packed; most kinds don't look at it."""
    gate, packed = cast("Gate", layer.gate), cast("PackedBlocks", layer.packed)
    if not gate.num_scores:
        getattr(gate, "see_once", gate.see)(packed.weight())
