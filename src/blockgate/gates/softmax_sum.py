"""The paper's Eq. 2, for comparison: k softmax heads, each of which comes to choose one block."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from blockgate.errors import invalid
from blockgate.gates.base import Gate
from blockgate.gates.registry import register_gate
from blockgate.gates.sigmoid import all_blocks
from blockgate.grid import BlockGrid, open_blocks
from blockgate.ops import topk_gates
from blockgate.spec import GateSpec

__all__ = ["SoftmaxSumGate", "check_temperature"]


@register_gate
class SoftmaxSumGate(Gate):
    """Sum of k softmax distributions over the blocks, scaled to mean 1.

    In training all blocks are open and `temperature` sharpens the heads as it falls. In eval every head opens the
    block of its largest score with the weight num_blocks / k; heads that agree add up. The number of heads is fixed
    when the gate is made: a higher sparsity uses the first k of them, a lower one raises.

    Args:
        grid: the grid whose blocks it opens.
        spec: its options; the sparsity decides the number of heads.
        temperature: divides the scores before the softmax. `blockgate.schedule.TemperatureRamp` lowers it in training;
            checkpoints hold it.
        place: device and dtype of the parameters.
    """

    kind = "softmax_sum"

    def __init__(self, grid: BlockGrid, spec: GateSpec, *, temperature: float = 1.0, **place: Any) -> None:
        self.heads = open_blocks(spec.sparsity, grid.num_blocks)
        self._num_blocks = grid.num_blocks
        super().__init__(grid, spec, **place)
        self.temperature = temperature
        self._first_sparsity = spec.sparsity

    @property
    def spec_to_make(self) -> GateSpec:
        """The spec with its first sparsity, which counts the heads: they may be more than are used now."""
        return replace(self.spec, sparsity=self._first_sparsity)

    def count_scores(self) -> int:
        """A score for each block and head."""
        return self.heads * self._num_blocks

    @property
    def temperature(self) -> float:
        """What divides the scores before the softmax."""
        return float(self._temperature)

    @temperature.setter
    def temperature(self, temperature: float) -> None:
        # A tensor, since torch.compile takes a number of a module for a constant and compiles again when it changes.
        self._temperature = torch.tensor(check_temperature(temperature), dtype=torch.float64, device="cpu")

    def kept_values(self) -> dict[str, Tensor]:
        """What checkpoints hold beside parameters and buffers."""
        return super().kept_values() | {"temperature": self._temperature.clone()}

    def take_kept(self, name: str, value: Tensor) -> None:
        """The sparsity or the temperature of a checkpoint."""
        super().take_kept(name, value)
        if name == "temperature":
            self.temperature = float(value)

    def reset_near_dense(self, weight: Tensor | None = None) -> None:
        """Each head starts with a block of its own, so that gates are near 1 whether soft or hard."""
        super().reset_near_dense(weight)
        own = torch.arange(self.heads, device=self.bias.device) % self._num_blocks
        first = torch.nn.functional.one_hot(own, self._num_blocks) if not own.is_meta else self.bias
        with torch.no_grad():
            self.bias.copy_(first.flatten())

    def count_open(self, sparsity: float) -> int:
        """How many heads to use; more than there are is an error."""
        wanted = open_blocks(sparsity, self._num_blocks)
        if wanted > self.heads:
            raise invalid(
                "sparsity",
                expected=f"a value that opens at most the {self.heads} heads of this gate",
                got=f"{sparsity} ({wanted} blocks)",
                remedy="Make the layer with the lowest sparsity that it will need.",
            )
        return wanted

    def choices(self, x: Tensor) -> Tensor:
        """Scores (N, heads in use, num_blocks) for x (N, in_features), divided by the temperature."""
        return self.scores(x).view(len(x), self.heads, -1)[:, : self.open_blocks] / self._temperature

    def use(self, choices: Tensor, open_counts: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """In training all blocks are open a little: what counts is where each head is heading."""
        chosen = torch.nn.functional.one_hot(choices.argmax(-1), choices.shape[-1]).to(choices.dtype)
        share = torch.softmax(choices, -1).mean(0)
        return share.mean(0, keepdim=True), chosen.mean((0, 1)).unsqueeze(0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Gates and block indices for x (N, in_features): (N, num_blocks) in training, (N, k) in eval."""
        heads = self.open_blocks
        scores = self.scores(x).view(-1, self.heads, self._num_blocks)[:, :heads]
        scale = self._num_blocks / heads
        if self.training:
            values = torch.softmax(scores / self._temperature, dim=-1).sum(1) * scale
            return values, all_blocks(values)
        votes = torch.zeros_like(scores[:, 0]).scatter_add(1, scores.argmax(-1), scores.new_ones(scores.shape[:2]))
        values, indices = topk_gates(votes, heads, normalise="none", backend=self.backend)
        return values * scale, indices


def check_temperature(temperature: float, what: str = "temperature") -> float:
    """Returns `temperature` as a float if it is a positive number."""
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not 0 < temperature < math.inf:
        raise invalid(what, expected="a positive number", got=temperature, remedy="Anneal from 1 to 0.1.")
    return float(temperature)
