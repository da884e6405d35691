"""Gates that start from data: fitted to what the blocks of a trained layer add to its output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockgate.convert.closeness import call, evaluating
from blockgate.errors import invalid
from blockgate.find import named_gates
from blockgate.gates.magnitude import contributions
from blockgate.gates.margin import MarginGate
from blockgate.gates.topk import TopKGate
from blockgate.runtime.linear import RunnableLinear
from blockgate.runtime.paired import RunnableMLP

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blockgate.gates import Gate

__all__ = ["calibrate"]

# How far fitted scores lie from 1, in standard deviations of what they are fitted to: values of gates stay near 1.
SPREAD = 0.1
# Rows of one batch that a layer is fitted to, at most.
MOST_ROWS = 2048


@torch.no_grad()
def calibrate(model: nn.Module, batches: Iterable[Any], *, ridge: float = 1e-2) -> dict[str, float]:
    """Fits the gates of a converted model to the norms of what their blocks add, by least squares in closed form.

    The model runs over the batches once with all blocks open. For every row of input each gate learns to predict how
    large the product of each block with it is, relative to the row. A hidden layer keeps its random weights; only what
    follows it is fitted. No labels are needed, and weights stay as they are.

    Fitted scores lie around 1. With `gate="topk", normalise="none"` they are the gates, so that open blocks keep about
    their trained size; the other rules scale open gates up to make good for the closed ones, which suits training.

    Args:
        model: gated linear layers whose gates have a network, `gate="topk"` or `"margin"`, as `sparsify_` makes them.
        batches: a few hundred inputs or more: tensors, tuples of arguments, or dicts of keyword arguments.
        ridge: added to the diagonal of the normal equations, relative to their mean.

    Returns:
        By layer, the share of the variance of the norms that its gate predicts, on these batches.
    """
    fits = _fits_of(model)
    if isinstance(batches, (Tensor, dict)):
        raise invalid("batches", expected="a list of inputs", got=type(batches).__name__, remedy="Put it in a list.")
    before = {fit.gate: fit.gate.target_sparsity for fit in fits.values()}
    handles = [fit.layer.register_forward_pre_hook(fit.see) for fit in fits.values()]
    try:
        for fit in fits.values():
            fit.gate.target_sparsity = 0.0
        with evaluating(model):
            for batch in batches:
                call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
        for gate, sparsity in before.items():
            gate.target_sparsity = sparsity
    if idle := [name for name, fit in fits.items() if fit.rows == 0]:
        raise invalid("batches", expected="inputs that reach every layer", got=f"none for {idle}", remedy="Add some.")
    return {name: fit.solve(ridge) for name, fit in fits.items()}


def _fits_of(model: nn.Module) -> dict[str, _Fit]:
    kinds = (RunnableLinear, RunnableMLP)
    owners = {module.gate: module for module in model.modules() if isinstance(module, kinds)}
    fits = {}
    for name, gate in named_gates(model).items():
        if gate not in owners or type(gate) not in {TopKGate, MarginGate}:
            raise invalid(
                f"layer {name!r}",
                expected="a gated linear layer with gate='topk' or 'margin', or a paired MLP with one",
                got=f"gate={gate.kind!r} of {type(owners.get(gate, model)).__name__}",
                remedy="Norm gates need no calibration; recurrent layers are trained.",
            )
        fits[name] = _Fit(owners[gate], gate)
    return fits


class _Fit:
    """The normal equations of one gate, summed over the rows that its layer sees."""

    def __init__(self, layer: RunnableLinear | RunnableMLP, gate: Gate) -> None:
        self.layer, self.gate, self.rows = layer, gate, 0
        width = gate.weight.shape[1] + 1
        self.features = torch.zeros(width, width, dtype=torch.double)
        self.products = torch.zeros(width, gate.grid.num_blocks, dtype=torch.double)
        self.squares = torch.zeros(gate.grid.num_blocks, dtype=torch.double)

    def see(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        gate = self.gate
        rows = args[0].reshape(-1, gate.grid.in_features)
        rows = rows[:: max(1, -(-len(rows) // MOST_ROWS))].float()
        norms = self._contributions(rows).sqrt().double()
        groups = norms.view(len(rows), gate.groups if isinstance(gate, TopKGate) else 1, -1)
        # Each choice is made among the blocks of a group in one row: only how they compare counts.
        target = (groups / groups.mean(-1, keepdim=True).clamp(min=1e-12)).flatten(1)
        features = torch.nn.functional.pad(self._features(rows).double(), (0, 1), value=1.0)
        self.features += (features.T @ features).cpu()
        self.products += (features.T @ target).cpu()
        self.squares += target.square().sum(0).cpu()
        self.rows += len(rows)

    def _contributions(self, rows: Tensor) -> Tensor:
        """Squared norm of what every block adds to the output of rows (N, in)."""
        layer = self.layer
        if isinstance(layer, RunnableMLP):
            return contributions(layer.hidden(rows), layer.down.matrix().float(), layer.down_grid)
        return contributions(rows, layer._matrix().float(), self.gate.grid)

    def _features(self, rows: Tensor) -> Tensor:
        key, network = self.gate.key_of(rows).float(), self.gate.network()
        if network.hidden_weight is None or network.hidden_bias is None:
            return key
        return torch.relu(key @ network.hidden_weight.float().T + network.hidden_bias.float())

    def solve(self, ridge: float) -> float:
        """Writes the fitted weights to the gate; the share of the variance that they predict."""
        gate = self.gate
        mean = self.features[-1, :-1] / self.rows
        average = self.products[-1] / self.rows
        covariance = self.features[:-1, :-1] / self.rows - mean.outer(mean)
        shared = self.products[:-1] / self.rows - mean[:, None] * average
        damped = covariance + ridge * covariance.diagonal().mean().clamp(min=1e-12) * torch.eye(len(mean)).double()
        solution = torch.linalg.solve(damped, shared)
        variance = (self.squares / self.rows - average.square()).clamp(min=0)
        # All scores of a gate by one rule, so that blocks which are larger on average stay ahead.
        scale = SPREAD / (variance + (average - average.mean()).square()).mean().sqrt().clamp(min=1e-12)
        bias = 1 + (average - average.mean()) * scale
        weight = (solution * scale).T
        if isinstance(gate, MarginGate):
            # This kind reads what is new in its key: the mean is its own.
            means = gate.key_mean if gate.hidden_mean is None else gate.hidden_mean
            means.copy_(mean)
        else:
            bias = bias - weight @ mean
        gate.weight.copy_(weight)
        gate.bias.copy_(bias)
        gate.count_change()
        explained = 2 * (solution * shared).sum() - (solution * (covariance @ solution)).sum()
        return float(explained / variance.sum().clamp(min=1e-30))
