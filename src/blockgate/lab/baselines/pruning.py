"""Gradual magnitude pruning (Zhu and Gupta, 2017), of single weights or of whole blocks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockgate.errors import invalid
from blockgate.gates.magnitude import block_mean_square
from blockgate.grid import BlockGrid, as_int, check_size, check_sparsity, open_blocks
from blockgate.lab.baselines.patterns import expand_blocks
from blockgate.schedule import RAMP_SHAPES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MagnitudePruner", "prunable_weights"]


def prunable_weights(model: nn.Module, filter_fn: Callable[[str], bool] | None = None) -> dict[str, nn.Parameter]:
    """The weight matrices of linear layers (a QRNN's filters among them) and LSTMs, by name.

    Args:
        model: any module.
        filter_fn: called with the name of each weight; those it answers with False are left out. Without it, output
            layers are in, even where they share their weight with an embedding.
    """
    matrices = {
        f"{path}.{name}" if path else name: weight
        for path, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.LSTM))
        for name, weight in module.named_parameters(recurse=False)
        if weight.dim() == 2
    }
    return {name: weight for name, weight in matrices.items() if filter_fn is None or filter_fn(name)}


class MagnitudePruner:
    """Sets the smallest entries of each weight to zero for good, more and more of them as training goes on.

    After `begin` steps the first entries are pruned, then again every `every` steps, the last time after `end` steps.
    What is asked for rises from `initial` to `final`, fast at first: final + (initial - final) * (1 - t)^3.

    Pruned entries get no gradient, so they don't count when gradients are clipped, and `step` sets them to zero again
    in case the optimizer has moved them by its momentum. The weights stay the parameters they are: torch's own
    `torch.nn.utils.prune` would put other tensors in their place, which an nn.LSTM doesn't look at.

    Args:
        weights: the matrices to prune, by name, see `prunable_weights`; each is pruned to the same sparsity.
        final: share of entries, or of blocks, that are pruned in the end, in [0, 1).
        begin: steps before the first pruning, from 1 on.
        end: steps before the last pruning.
        every: steps between prunings.
        initial: share that the first pruning takes.
        block_size: prune whole blocks, those of the smallest mean square; None for single entries.
    """

    def __init__(
        self,
        weights: dict[str, nn.Parameter],
        final: float,
        begin: int,
        end: int,
        every: int = 1,
        *,
        initial: float = 0.05,
        block_size: int | tuple[int, int] | None = None,
    ) -> None:
        if not weights or any(weight.dim() != 2 for weight in weights.values()):
            raise invalid("weights", expected="one matrix or more", got=list(weights), remedy="See prunable_weights.")
        self.weights = dict(weights)
        self.final = check_sparsity(final, "final")
        self.initial = check_sparsity(initial, "initial")
        self.begin, self.end = check_size("begin", begin), check_size("end", end)
        self.every = check_size("every", every)
        if self.begin > self.end or self.initial > self.final:
            raise invalid(
                "pruning",
                expected="begin <= end and initial <= final",
                got=f"begin {begin}, end {end}, initial {initial}, final {final}",
                remedy="Steps are counted in updates.",
            )
        self.grids = {
            name: None if block_size is None else BlockGrid(weight.shape[0], weight.shape[1], block_size)
            for name, weight in weights.items()
        }
        self.steps_done = 0
        # True where an entry is gone; nothing for weights that have not been pruned yet.
        self.pruned: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            weight.register_hook(partial(self._without_pruned, name))

    @property
    def sparsity(self) -> float:
        """What the last pruning was asked for; 0 before the first."""
        return self.sparsity_at(self.steps_done)

    def sparsity_at(self, step: int) -> float:
        """The sparsity that is asked for after `step` steps."""
        if step < self.begin:
            return 0.0
        if step >= self.end:
            return self.final
        time = step - (step - self.begin) % self.every
        way = RAMP_SHAPES["cubic"]((time - self.begin) / (self.end - self.begin))
        return self.initial + (self.final - self.initial) * way

    @torch.no_grad()
    def step(self) -> float:
        """Call it after every step of the optimizer. Returns the sparsity that is asked for."""
        self.steps_done += 1
        since = self.steps_done - self.begin
        if self.steps_done == self.end or (0 <= since < self.end - self.begin and since % self.every == 0):
            for name, weight in self.weights.items():
                self.pruned[name] = self._choose(name, weight)
        self._zero_pruned()
        return self.sparsity

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on from here."""
        return {"steps_done": self.steps_done, "pruned": dict(self.pruned)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint, whose weights have been loaded."""
        steps = as_int(state.get("steps_done")) if isinstance(state, dict) else None
        pruned = state.get("pruned") if isinstance(state, dict) else None
        if steps is None or not isinstance(pruned, dict) or not set(pruned) <= set(self.weights):
            raise invalid(
                "pruning state",
                expected=f"steps_done and what is pruned of {list(self.weights)}",
                got=list(state) if isinstance(state, dict) else state,
                remedy="Load what state_dict() gave.",
            )
        self.steps_done = steps
        self.pruned = {name: mask.to(self.weights[name].device) for name, mask in pruned.items()}
        self._zero_pruned()

    def _choose(self, name: str, weight: Tensor) -> Tensor:
        """Which entries (m, n) go now: those that are gone, and the smallest of the others."""
        grid = self.grids[name]
        sizes = weight.abs() if grid is None else block_mean_square(weight, grid)
        if name in self.pruned:
            gone = self.pruned[name]
            # A block is gone when the entries of it are; one with zeros in it by chance is not.
            before = gone if grid is None else block_mean_square(gone, grid) == 1
            sizes = sizes.masked_fill(before, -1.0)
        kept = open_blocks(self.sparsity, sizes.numel())
        # A stable sort: among equals the first ones stay, on every machine.
        order = sizes.flatten().sort(descending=True, stable=True).indices
        pruned = torch.ones(sizes.numel(), dtype=torch.bool, device=weight.device)
        pruned[order[:kept]] = False
        pruned = pruned.view_as(sizes)
        return pruned if grid is None else expand_blocks(pruned, grid)

    @torch.no_grad()
    def _zero_pruned(self) -> None:
        for name, mask in self.pruned.items():
            self.weights[name].masked_fill_(mask, 0.0)

    def _without_pruned(self, name: str, gradient: Tensor) -> Tensor:
        return gradient.masked_fill(self.pruned[name], 0.0) if name in self.pruned else gradient
