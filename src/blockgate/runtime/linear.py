"""How a gated linear layer runs: in one native call on a packed copy that follows its weights, or op by op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from blockgate.ops import check_device, gated_linear
from blockgate.ops.gpu import runs_kernels
from blockgate.runtime.block_linear import GatedLinear, autocast_dtype, check_like, check_rows
from blockgate.runtime.exporting import EXPORTABLE, refuse_onnx_export
from blockgate.runtime.follow import Followed, versions_refusal
from blockgate.runtime.plan import (
    FUSED,
    GRADIENTS,
    Plan,
    Refusal,
    gate_refusal,
    gpu_refusal,
    input_refusal,
    memory_refusal,
    observing_refusal,
    shadow_refusal,
    slower_path,
    watcher_refusal,
    weights_refusal,
)
from blockgate.runtime.prepared import PreparedLinear, copied_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from blockgate.gates.topk import TopKGate

__all__ = ["RunnableLinear"]


class RunnableLinear(nn.Module, GatedLinear):
    """A module with `weight`, `bias` and `gate` that can be called; what registers them is a layer."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        self._copy: Followed[PreparedLinear] = Followed()

    def forward(self, x: Tensor) -> Tensor:
        """y (..., out_features) for x (..., in_features), at the cost of the blocks that x opens."""
        fused = self._fused(x)
        if type(fused) is PreparedLinear and fused.fits(x):
            return fused(x)
        self._check_input(x)
        refuse_onnx_export("a gated layer", EXPORTABLE)
        rows = x.reshape(-1, self.in_features)
        autocast = autocast_dtype(x.device.type)
        if autocast is not None:
            # The gate stays in the parameters' precision, so that it opens the same blocks.
            rows = rows.to(self.weight.dtype)
        weight = self._matrix()
        if self.gate.training:
            self.gate.observe(rows)
        gates, indices = self.gate.decide(rows, weight)
        if autocast is not None and runs_kernels(self.backend, x.device.type):
            # So does the product, where there are no tensor cores to gain.
            rows, weight = rows.to(autocast), weight.to(autocast)
        y = gated_linear(rows, weight, self.bias, gates, indices, self.grid.block, backend=self.backend)
        if autocast is not None:
            y = y.to(autocast)
        return y.view(*x.shape[:-1], self.out_features)

    def gates(self, x: Tensor) -> Tensor:
        """The gates that x (..., in_features) gets: (..., out_blocks, in_blocks), 0 where closed."""
        self.gate.see(self._matrix())
        return super().gates(x)

    def plan(self, x: Tensor) -> Plan:
        """Which path `forward` takes for x now, and why."""
        fused = self._fused(x)
        if isinstance(fused, Refusal):
            return slower_path(fused, x, self.backend, [gpu_refusal(self.weight.dtype, self.gate)])
        return Plan(FUSED, figures=fused.figures(x))

    def repack(self) -> None:
        """Forgets the packed copy of the weights that inference without gradients makes on first use.

        Only needed after writing in ways that torch can't see: through `.data`, NumPy, a buffer that parameters are
        views of, or another process. The copy follows optimizer steps, `load_state_dict`, in-place edits and `.to()`.
        """
        self._copy.drop()

    def train(self, mode: bool = True) -> Self:
        """As nn.Module.train; training gives back the memory of the packed copy."""
        if mode:
            self.repack()
        return super().train(mode)

    def _fused(self, x: Tensor) -> PreparedLinear | Refusal:
        """The layer prepared for one native call, or what stands against it."""
        if torch.is_grad_enabled():
            return GRADIENTS
        gate, parameters = cast("TopKGate", self._modules["gate"]), self._parameters
        refusal = input_refusal(x) or watcher_refusal(gate) or observing_refusal(gate) or shadow_refusal(self)
        if refusal is not None:
            return refusal
        objects = (*parameters.values(), type(gate), gate._spec, *gate._parameters.values(), *gate._buffers.values())
        return self._copy.get(objects, self._copied, self._prepare)

    def _copied(self) -> list[Tensor]:
        """The tensors that preparing the layer copies."""
        return copied_of(self.weight, self.gate)

    def _prepare(self) -> PreparedLinear | Refusal:
        refusal = weights_refusal(self, ("weight", "bias")) or gate_refusal(self.gate)
        refusal = refusal or memory_refusal((self.weight, self.bias, *self.gate.parameters(), *self.gate.buffers()))
        refusal = refusal or versions_refusal(self._copied())
        if refusal is not None:
            return refusal
        return PreparedLinear.copy_of(self._matrix(), self.bias, self.gate)

    def _matrix(self) -> Tensor:
        """The weight as (out_features, in_features), for layers that store it in another way."""
        return self.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.repack()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        # Native code holds the biases: where loading swaps tensors, nobody else may.
        self.repack()
        super()._load_from_state_dict(*args)

    def _check_input(self, x: Tensor) -> None:
        check_rows(x, self.in_features)
        check_like(x, self.weight)
        check_device(self.backend, x.device.type)
