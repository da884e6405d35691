"""Gates that measure by how much a block was chosen, and that read what is new in their input.

Why trained gates freeze: the features they read have means, and a weight times a mean is one more bias. With Adam
these biases, as many as there are features, all move at once, so that a gate learns which blocks are good for all
inputs long before it learns which are good for this one. Here the key is read less its running mean, and only the bias
itself, which moves slowly, says what all inputs have in common.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from blockgate.gates.means import RunningMeans
from blockgate.gates.network import GateNetwork
from blockgate.gates.recompute import in_backward
from blockgate.gates.registry import register_gate
from blockgate.gates.topk import TopKGate
from blockgate.grid import BlockGrid
from blockgate.ops import gate_scores
from blockgate.ops.gate_scores import centred_scores
from blockgate.ops.gpu import runs_kernels
from blockgate.spec import GateSpec

__all__ = ["MarginGate"]

# The mean of a hidden layer is taken over at most this many rows of a batch: it costs work to know it.
HIDDEN_ROWS = 128


@register_gate
class MarginGate(TopKGate, RunningMeans):
    """Opens the k largest scores; a gate is the distance to the largest score that stays closed, scaled to rms 1.

    Exactly k blocks open, whatever the signs of the scores. A block that is about to change has the value 0, adding a
    constant to all scores changes nothing, and the runner-up gets a gradient: so blocks come and go without a jump, and
    none dies by drifting. In a layer that was trained without gates (`GateSpec.near_dense`) each gate is 1 more while
    all blocks are open, so that they start near 1; what is added falls with the cube of the density.

    Args as in `Gate`; `GateSpec.select` is an option of this kind.

    Attributes:
        key_mean: (key_size) running mean of the key, counted in training.
        hidden_mean: (hidden_size) the same of the hidden layer, or None.
    """

    kind = "margin"
    aliases = {}  # noqa: RUF012
    own_options = frozenset({"select"})
    native = True
    observes = True

    key_mean: Tensor
    hidden_mean: Tensor | None

    def __init__(self, grid: BlockGrid, spec: GateSpec, **place: Any) -> None:
        super().__init__(grid, spec, **place)
        weights = [weight for weight, _ in reversed(self._layers())]
        for name, weight in zip(("key_mean", "hidden_mean"), (*weights, None), strict=False):
            self.register_buffer(name, None if weight is None else torch.zeros_like(weight[0]))

    def _take(self, spec: GateSpec) -> None:
        super()._take(spec)
        self._normalise = "margin_near_dense" if spec.near_dense else "margin"

    def network(self) -> GateNetwork:
        """The parameters, with W (key - mean) + b written as W key + (b - W mean)."""
        if self.hidden_weight is None or self.hidden_bias is None or self.hidden_mean is None:
            return GateNetwork(self.weight, _centred(self.bias, self.weight, self.key_mean), None, None)
        return GateNetwork(
            self.weight,
            _centred(self.bias, self.weight, self.hidden_mean),
            self.hidden_weight,
            _centred(self.hidden_bias, self.hidden_weight, self.key_mean),
        )

    def scores(self, x: Tensor) -> Tensor:
        """Raw scores (N, num_scores) for x (N, in_features); on a GPU one launch for each layer of the network."""
        replaced = type(self).network is not MarginGate.network or "network" in self.__dict__
        if replaced or not runs_kernels(self.backend, x.device.type):
            return super().scores(x)
        self._check_input(x)
        key, mean = self.key_of(x), self.key_mean
        if self.hidden_weight is not None and self.hidden_bias is not None and self.hidden_mean is not None:
            key = centred_scores(key, self.hidden_weight, self.hidden_bias, mean, backend=self.backend)
            key, mean = torch.relu(key), self.hidden_mean
        return centred_scores(key, self.weight, self.bias, mean, backend=self.backend)

    def copied(self) -> list[Tensor]:
        """All of it: the biases that native code reads are made here."""
        return [*self.parameters(), *self.buffers()]

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Moves the running means towards those of the rows x (N, in_features)."""
        if in_backward() or not (len(x) or self.shared):
            return
        self._check_input(x)
        key = self.key_of(x).to(self.key_mean.dtype)
        if self.hidden_mean is not None:
            _, _, weight, bias = self.network()
            assert weight is not None
            some = key[:: max(1, -(-len(key) // HIDDEN_ROWS))].contiguous()
            hidden = torch.relu(gate_scores(some, weight, bias, backend=self.backend))
            self.move(self.hidden_mean, hidden)
        self.move(self.key_mean, key)

    def _reset(self) -> None:
        super()._reset()
        for mean in self.buffers():
            mean.zero_()

    @property
    def near_dense(self) -> Tensor:
        """Whether gates start near 1: as the sparsity, it says what is computed, so that weights are not enough."""
        return torch.tensor(self._spec.near_dense, device="cpu")

    @near_dense.setter
    def near_dense(self, value: Tensor) -> None:
        self.take_kept("near_dense", value)

    def kept_values(self) -> dict[str, Tensor]:
        """What checkpoints hold beside parameters and buffers."""
        return {**super().kept_values(), "near_dense": self.near_dense}

    def take_kept(self, name: str, value: Tensor) -> None:
        """A value of a checkpoint."""
        super().take_kept(name, value)
        if name == "near_dense":
            self._take(replace(self._spec, near_dense=bool(value)))
            self.count_change()


def _centred(bias: Tensor, weight: Tensor, mean: Tensor) -> Tensor:
    """bias - weight @ mean, in the precision of the parameters under autocast too, which would lower that of `@`."""
    # A copy: the running mean moves on before the gradient is asked for.
    return bias - (weight * mean.clone()).sum(1)
