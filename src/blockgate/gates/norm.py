"""Gates without training: a block opens where the input is large and so are the weights that it meets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from blockgate.errors import invalid
from blockgate.gates.base import Gate
from blockgate.gates.registry import register_gate
from blockgate.grid import BlockGrid, open_blocks
from blockgate.ops import topk_gates
from blockgate.spec import GateSpec

__all__ = ["NormGate", "column_norms"]


@register_gate
class NormGate(Gate):
    """Opens, in every row of blocks, the k blocks of largest |x| times the norm of their columns; gates are 1.

    It has no parameters and reads the whole input. For blocks of one column, `block_size=(out, 1)`, the score is the
    norm of what the block adds to the output. For wider ones it is the root of the sum of its squares over columns,
    which leaves out how the columns point; they lose far more of a trained model.

    Args as in `Gate`; of the options of gates it takes block_size, sparsity and backend.

    Attributes:
        norms: (out_blocks, in_features) norms of the columns of each row of blocks. Made from the weight of the layer
            whenever that changes, and not saved; all 1 for a gate that has seen no weight.
    """

    kind = "norm"

    norms: Tensor

    def __init__(self, grid: BlockGrid, spec: GateSpec, **place: Any) -> None:
        super().__init__(grid, spec, **place)
        ones = torch.ones(grid.out_blocks, grid.in_features, device=place.get("device"), dtype=place.get("dtype"))
        self.register_buffer("norms", ones, persistent=False)
        self._seen: tuple[Any, ...] | None = None
        self._held: Tensor | None = None

    def _take(self, spec: GateSpec) -> None:
        given = {
            name: value
            for name, value in (("key_size", spec.key_size), ("key_offset", spec.key_offset))
            if value not in {"auto", None, 0}
        }
        if spec.gate_hidden is not None:
            given["gate_hidden"] = spec.gate_hidden
        if given:
            raise invalid(
                "gate='norm'",
                expected="the options block_size, sparsity and backend",
                got=given,
                remedy="It has no network: leave the others unset.",
            )
        super()._take(spec)
        self._key = (0, self.grid.in_features)

    def count_scores(self) -> int:
        """None that a network would have to learn."""
        return 0

    @property
    def group_size(self) -> int:
        """How many blocks it chooses from at once: a row of them."""
        return self.grid.in_blocks

    def count_open(self, sparsity: float) -> int:
        """How many blocks to keep in every row of blocks."""
        return open_blocks(sparsity, self.grid.in_blocks)

    @property
    def target_density(self) -> float:
        """The share of blocks that open; rounding to whole blocks included."""
        return self.open_blocks / self.grid.in_blocks

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compact gates and ascending block indices, (N, out_blocks * open_blocks), for x (N, in_features)."""
        with torch.no_grad():
            values, indices = topk_gates(
                self.scores(x), self.open_blocks, groups=self.grid.out_blocks, normalise="none", backend=self.backend
            )
        # A block whose score is 0 adds nothing: it stays closed. A score of NaN stays visible.
        return torch.where(values > 0, torch.ones_like(values), values), indices

    def scores(self, x: Tensor) -> Tensor:
        """Scores (N, num_blocks), from 0 up, for x (N, in_features)."""
        self._check_input(x)
        norms = self.norms
        parts: Tensor = x.detach().to(torch.promote_types(x.dtype, torch.float32)).abs().unsqueeze(1) * norms
        width = min(self.grid.block[1], self.grid.in_features)
        if width > 1:
            missing = self.grid.in_blocks * width - self.grid.in_features
            squares = F.pad(parts.square(), (0, missing)).view(len(x), self.grid.out_blocks, self.grid.in_blocks, width)
            parts = squares.sum(3).sqrt()
        return parts.flatten(1)

    def count_macs(self) -> int:
        """One product for every input and row of blocks."""
        return self.norms.numel()

    @torch.no_grad()
    def see(self, weight: Tensor) -> None:
        """Takes the norms of a weight (out_features, in_features), unless it is known to have these already."""
        # Without gradients a weight changes by steps that count its version; optimizers may leave none, so what they
        # train is read every time.
        fixed = not (self.training or torch.is_grad_enabled()) and not weight.is_inference()
        seen = (weight.data_ptr(), weight._version, weight.shape, weight.dtype) if fixed else None
        if seen is None or seen != self._seen:
            self.see_once(weight)
            # Held memory keeps its address from being given to another weight.
            self._seen, self._held = seen, None if seen is None else weight.detach()

    @torch.no_grad()
    def see_once(self, weight: Tensor) -> None:
        """Takes the norms of a weight that is gone after this call."""
        norms = column_norms(weight, self.grid)
        self.norms = norms if norms.is_meta or self.norms.is_meta else norms.to(self.norms.device)
        self._seen = self._held = None

    def reset_near_dense(self, weight: Tensor | None = None) -> None:
        """Nothing to set but the norms of `weight`: with all blocks open it is dense."""
        super().reset_near_dense(weight)
        if weight is not None:
            self.see(weight)

    def choices(self, x: Tensor) -> Tensor:
        """Scores (N, out_blocks, in_blocks) for x (N, in_features)."""
        return self.scores(x).view(len(x), self.grid.out_blocks, -1)

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return f"{self.kind}, sparsity={self.target_sparsity:g}"

    def __getstate__(self) -> dict[str, Any]:
        # Memory of a copy may lie where that of another weight lay.
        return {**self.__dict__, "_seen": None, "_held": None}


def column_norms(weight: Tensor, grid: BlockGrid) -> Tensor:
    """Norms (out_blocks, in_features) of the columns of each row of blocks of a weight (out, in), in float32."""
    weight = weight.detach()
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    height = min(grid.block[0], grid.out_features)
    return torch.stack([part.norm(dim=0) for part in weight.split(height)])
