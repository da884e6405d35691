"""Paired MLPs on packed blocks: gate, selection, both products and the activation are one call for a few rows."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from blockgate.changes import CountsChanges
from blockgate.formats import get_format
from blockgate.ops.packed_linear import packed_linear, run_prepared_mlp
from blockgate.runtime.block_linear import autocast_dtype, check_packed_input, moving_only
from blockgate.runtime.exporting import PACKED, refuse_onnx_export
from blockgate.runtime.packed import PackedLinear
from blockgate.runtime.paired import ACTIVATIONS, PairedMLP, RunnableMLP
from blockgate.runtime.plan import (
    FUSED,
    GRADIENTS,
    Plan,
    Refusal,
    gate_refusal,
    input_refusal,
    memory_refusal,
    slower_path,
    watcher_refusal,
)
from blockgate.runtime.prepared import PreparedLinear

if TYPE_CHECKING:
    from typing_extensions import Self

    from blockgate.formats import Format
    from blockgate.gates import Gate
    from blockgate.gates.topk import TopKGate
    from blockgate.grid import BlockGrid
    from blockgate.runtime.paired import PairedLinear

__all__ = ["PackedPairedLinear", "PackedPairedMLP"]

# With more rows than this the calls of separate ops no longer matter, and hidden channels would fill much memory.
MOST_ROWS = 1024

ACTIVATION = Refusal("the activation has no native code", f"Native are {', '.join(ACTIVATIONS)}.")
ROWS = Refusal(f"more than {MOST_ROWS} rows", "Nothing to do: with many rows separate ops are as fast.")


class PackedPairedLinear(PackedLinear):
    """The packed blocks of one matrix of a paired MLP, where the dense layer had its weight; passes on its input.

    Args:
        part: the matrix.
        grid: its cut.
        dtype: as for `PackedLinear`.
    """

    def __init__(self, part: PairedLinear, grid: BlockGrid, dtype: str | torch.dtype | Format) -> None:
        super().__init__(part.weight, part.bias, dtype, grid, transposed=part.transposed)
        self.multiplies = part.multiplies

    def forward(self, x: Tensor) -> Tensor:
        """x, or 1 where the model multiplies by the output: the MLP has done its work."""
        return x.new_ones(()) if self.multiplies else x

    def open_product(self, rows: Tensor, gates: Tensor, indices: Tensor) -> Tensor:
        """y (N, out_features) of the open blocks for rows (N, in_features) of float32, by the op."""
        packed = self.packed
        y: Tensor = packed_linear(
            rows, packed.blocks, packed.scale, self.bias, gates, indices, packed.sizes, packed.format.name
        )
        return y


class PackedPairedMLP(CountsChanges, PairedMLP):
    """DynamicSparseMLP on packed blocks, for inference; made by `pack`. The gate stays float32.

    Args:
        layer: the MLP; copied, and not kept.
        dtype: a format of `blockgate.formats`, by name, or as the torch dtype of that name.
    """

    up: PackedPairedLinear
    down: PackedPairedLinear
    gate_proj: PackedPairedLinear | None
    # What is prepared, or why nothing can be; and how often the parts had changed then.
    _prepared: tuple[list[PreparedLinear] | Refusal | None, tuple[int, ...]]

    def __init__(self, layer: RunnableMLP, dtype: str | torch.dtype | Format) -> None:
        super().__init__()
        stored_as = get_format(dtype)
        self.grid, self.outputs, self.matrices_of_input = layer.grid, layer.outputs, layer.matrices_of_input
        self.activation = copy.deepcopy(layer.activation)
        self.gate: Gate = copy.deepcopy(layer.gate).float().requires_grad_(False).eval()
        grids = {"up": layer.grid, "down": layer.down_grid, "gate_proj": layer.grid}
        for name, grid in grids.items():
            part: PairedLinear | None = getattr(layer, name)
            packed = None if part is None else PackedPairedLinear(part, grid, stored_as)
            if name in layer.__dict__:
                # As in the layer that is packed: the matrix has its own place in the model.
                self.__dict__[name] = packed
            else:
                setattr(self, name, packed)
        self.repack()

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are stored as."""
        return self.up.packed.dtype

    def named_parts(self) -> dict[str, PackedPairedLinear]:
        """Its matrices, in the order in which native code takes them."""
        named = {"up": self.up, "down": self.down, "gate_proj": self.gate_proj}
        return {name: part for name, part in named.items() if part is not None}

    def forward(self, x: Tensor) -> Tensor:
        """y (..., out_features) for x (..., in_features), in the type of x; computed in float32."""
        fused = self._fused(x)
        if type(fused) is list and x.dim() and x.shape[-1] == self.in_features:
            up, down, *others = (prepared.handle for prepared in fused)
            gate = cast("TopKGate", self._modules["gate"])
            rows = x.reshape(-1, self.in_features)
            y: Tensor = run_prepared_mlp(rows, up, down, [*others], gate._open_blocks, self.activation)
            return y.view(*x.shape[:-1], self.outputs)
        self._check_input(x)
        refuse_onnx_export("a packed layer", PACKED)
        y = self._product(x.reshape(-1, self.in_features).float())
        return y.to(autocast_dtype(x.device.type) or x.dtype).view(*x.shape[:-1], self.outputs)

    def plan(self, x: Tensor) -> Plan:
        """Which path `forward` takes for x now, and why."""
        fused = self._fused(x)
        if isinstance(fused, Refusal):
            return slower_path(fused, x, "auto", [part.gpu_refusal() for part in self.named_parts().values()])
        return Plan(FUSED, figures=fused[0].figures(x))

    def gates(self, x: Tensor) -> Tensor:
        """The gates that x (..., in_features) gets: (..., blocks), 0 where closed."""
        return super().gates(x.float())

    def repack(self) -> None:
        """Forgets what is prepared for native calls; needed after editing the values of gate weights by hand."""
        self.__dict__["_prepared"] = (None, ())

    def train(self, mode: bool = True) -> Self:  # noqa: ARG002
        """Packed layers are for inference: they stay in eval mode, whatever the model around them does."""
        return super().train(False)

    def extra_repr(self) -> str:
        """The sizes, for print(model)."""
        activation = self.activation if isinstance(self.activation, str) else type(self.activation).__name__
        return (
            f"in_features={self.in_features}, hidden_features={self.hidden_features}, "
            f"out_features={self.outputs}, activation={activation}, {self.up.packed.format.name}"
        )

    def _fused(self, x: Tensor) -> list[PreparedLinear] | Refusal:
        """The matrices prepared for one native call with x, or what stands against it."""
        if not isinstance(self.activation, str):
            return ACTIVATION
        refusal = input_refusal(x) or watcher_refusal(self.gate)
        if refusal is None and x.requires_grad and torch.is_grad_enabled():
            refusal = GRADIENTS
        if refusal is None and x.numel() > MOST_ROWS * self.in_features:
            refusal = ROWS
        return refusal or self._prepare()

    def _prepare(self) -> list[PreparedLinear] | Refusal:
        parts = [*self.named_parts().values()]
        changes = (self.changes, self.gate.changes, *(n for part in parts for n in part._count_changes()))
        known = self._prepared
        if known[0] is not None and known[1] == changes:
            return known[0]
        made: list[PreparedLinear] | Refusal | None = gate_refusal(self.gate) or memory_refusal(self.gate.parameters())
        if made is None:
            prepared = [part.prepared_with(self.gate if part is self.up else None) for part in parts]
            refusals = [p for p in prepared if isinstance(p, Refusal)]
            made = refusals[0] if refusals else [p for p in prepared if not isinstance(p, Refusal)]
        self.__dict__["_prepared"] = (made, changes)
        return made

    def _product(self, rows: Tensor) -> Tensor:
        gates, indices = self.gate(rows)
        opened = (gates != 0).to(gates.dtype)
        hidden = self._activate((self.gate_proj or self.up).open_product(rows, opened, indices))
        if self.gate_proj is not None:
            hidden = hidden * self.up.open_product(rows, opened, indices)
        # Inputs of integer formats are rounded row by row: a closed channel must not decide how.
        width = min(self.grid.block[0], self.hidden_features)
        closed = torch.ones(len(rows), self.grid.num_blocks, dtype=torch.bool, device=rows.device)
        closed = closed.scatter_(1, indices, gates == 0).repeat_interleave(width, 1)[:, : self.hidden_features]
        y = self.down.open_product(hidden.masked_fill(closed, 0.0), gates, indices)
        # What is wrong with x reaches y even where no block opens, as in a dense layer.
        return torch.where(torch.isfinite(rows).all(-1, keepdim=True), y, torch.nan)

    def _activate(self, hidden: Tensor) -> Tensor:
        function = self.activation
        return ACTIVATIONS[function](hidden) if isinstance(function, str) else cast("Tensor", function(hidden))

    def _check_input(self, x: Tensor) -> None:
        check_packed_input(x, self.in_features, self.up.packed.blocks)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.repack()
        return super()._apply(moving_only(fn), recurse)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.repack()
        super()._load_from_state_dict(*args)

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles prepare their own.
        return {**self.__dict__, "_prepared": (None, ())}
