"""What all gates share: the part of the input they read, the small network that scores blocks, the sparsity."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from blockgate.errors import invalid
from blockgate.gates.carrier import carry
from blockgate.gates.kept import KeepsSparsity
from blockgate.gates.network import GateNetwork
from blockgate.grid import BlockGrid, check_sparsity
from blockgate.ops import gate_scores
from blockgate.spec import GateSpec

__all__ = ["Gate"]

# The options of GateSpec that only some kinds take.
OPTIONS_OF_KINDS = ("normalise", "select")

# How far a gate made for a trained dense layer starts from the value 1, in standard deviations for a unit input.
NEAR_DENSE_SPREAD = 0.02


class Gate(KeepsSparsity, ABC):
    """Decides, for every row of the input, which blocks of a grid open and how wide.

    Calling a gate with x (N, in_features) returns compact gates: values (N, E), 0 where closed, and the index of the
    block each belongs to (N, E). Values are float32 or wider, whatever the type of x.

    A kind of gate is a subclass with a `kind`, registered by `register_gate`; it says what `forward` computes from
    `self.scores(x)` and how many blocks a sparsity opens.

    Args:
        grid: the grid whose blocks it opens.
        spec: its options. The sparsity is the one to start with.
        device: of the parameters.
        dtype: of the parameters.
    """

    kind: ClassVar[str]
    # Other names for this kind, each with the options that it stands for.
    aliases: ClassVar[dict[str, dict[str, Any]]] = {}
    # Which of the options that only some kinds have this kind takes.
    own_options: ClassVar[frozenset[str]] = frozenset()
    # Whether native code computes this class, selection included. Not inherited: a subclass may compute another thing.
    native: ClassVar[bool] = False
    # Whether it keeps count of what it sees in training, in `observe`.
    observes: ClassVar[bool] = False

    # None in kinds that have no network: see `count_scores`.
    weight: nn.Parameter
    bias: nn.Parameter
    hidden_weight: nn.Parameter | None
    hidden_bias: nn.Parameter | None

    def __init__(
        self,
        grid: BlockGrid,
        spec: GateSpec,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.grid = grid
        self._take(spec)
        self.num_scores = self.count_scores()
        scored, hidden = self.hidden_size or self.key_size, self.hidden_size if self.num_scores else 0
        shapes = {
            "weight": (self.num_scores, scored),
            "bias": (self.num_scores,),
            "hidden_weight": (hidden, self.key_size),
            "hidden_bias": (hidden,),
        }
        for name, shape in shapes.items():
            # A layer of no outputs has no parameters: a kind that computes its scores in another way has none at all.
            made = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if shape[0] else None
            self.register_parameter(name, made)
        self.target_sparsity = self._spec.sparsity
        self.reset_parameters()

    @property
    def spec(self) -> GateSpec:
        """Its options as they are now. Assign a changed spec to change them; parameters must keep their shapes."""
        return replace(self._spec, sparsity=self.target_sparsity)

    @spec.setter
    def spec(self, spec: GateSpec) -> None:
        before, shapes = self._spec, self._shapes()
        fits = spec.gate in {self.kind, *self.own_aliases()} and spec.block_size == self.grid.block
        try:
            self._take(spec)
            open_blocks = self.count_open(spec.sparsity)
            fits = fits and self._shapes() == shapes
        except BaseException:
            self._take(before)
            raise
        if not fits:
            self._take(before)
            raise invalid(
                "spec",
                expected=f"options that keep the kind, the blocks and the shapes of the gate, {before}",
                got=spec,
                remedy="Make a new layer with this spec.",
            )
        self._open(spec.sparsity, open_blocks)

    @property
    def spec_to_make(self) -> GateSpec:
        """The spec that makes such a gate again, for checkpoints; the sparsity of now is kept beside it."""
        return self.spec

    @classmethod
    def own_aliases(cls) -> dict[str, dict[str, Any]]:
        """Other names for this very kind; a subclass has its own."""
        aliases: dict[str, dict[str, Any]] = vars(cls).get("aliases", {})
        return aliases

    def _take(self, spec: GateSpec) -> None:
        """Makes `spec` the gate's own: what it means for this grid is worked out once."""
        spec = self._resolved(spec)
        self._key = spec.key(self.grid.in_features)
        self._hidden_size, self._backend = spec.gate_hidden or 0, spec.backend
        self._spec = replace(spec, block_size=self.grid.block, gate=self.kind)

    def _resolved(self, spec: GateSpec) -> GateSpec:
        """The spec with an alias spelled out; options that this kind doesn't take are an error."""
        meant = self.own_aliases().get(str(spec.gate), {})
        given = {name: value for name in OPTIONS_OF_KINDS if (value := getattr(spec, name)) is not None}
        foreign = {n: v for n, v in given.items() if n not in self.own_options or (meant and v != meant.get(n))}
        if foreign:
            raise invalid(
                "normalise and select",
                expected=f"neither with gate={spec.gate if meant else self.kind!r}",
                got=foreign,
                remedy="gate='topk' has both, gate='margin' has select; leave the others unset, or None.",
            )
        return replace(spec, **meant)

    def _shapes(self) -> tuple[int, int, int]:
        return self.count_scores(), self.key_size, self.hidden_size

    @property
    def key_offset(self) -> int:
        """The first feature it reads."""
        return self._key[0]

    @property
    def key_size(self) -> int:
        """How many features it reads."""
        return self._key[1]

    @property
    def hidden_size(self) -> int:
        """Width of its hidden layer, 0 for none."""
        return self._hidden_size

    @property
    def backend(self) -> str:
        """Which code computes: see `GateSpec.backend`."""
        return self._backend

    @property
    def rule(self) -> tuple[Any, ...]:
        """All that decides what it computes, but its parameters and its sparsity: equal for gates that are alike."""
        return (self.kind, self.grid, self._key, self._hidden_size, self.num_scores)

    def count_scores(self) -> int:
        """How many scores its network gives a row: one for each block, unless the kind says otherwise; 0: none."""
        return self.grid.num_blocks

    @property
    def group_size(self) -> int:
        """How many scores its selection chooses from at once; 0 for kinds that don't select with `topk_gates`."""
        return 0

    @abstractmethod
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compact gates and block indices, (N, E) each, for x (N, in_features)."""

    def see(self, weight: Tensor) -> None:
        """Told of the layer's weight (out_features, in_features), for kinds that look at it, before it is called."""

    def decide(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """What layers call: as `forward`, for kinds that look at the weight (out_features, in_features) too."""
        self.see(weight)
        gates: tuple[Tensor, Tensor] = self(x)
        return gates

    @abstractmethod
    def count_open(self, sparsity: float) -> int:
        """How many blocks (per group, where the gate chooses in groups) a sparsity opens; raises if it can't."""

    @property
    def target_sparsity(self) -> float:
        """The share of blocks that is to stay closed. May change at any time."""
        return self._sparsity

    @target_sparsity.setter
    def target_sparsity(self, sparsity: float) -> None:
        self._open(sparsity, self.count_open(check_sparsity(sparsity)))

    def _open(self, sparsity: float, open_blocks: int) -> None:
        self._sparsity = float(sparsity)
        self._open_blocks = open_blocks
        self._open_blocks_carrier = carry(open_blocks)

    @property
    def open_blocks(self) -> int:
        """The integer k that the sparsity means for this gate."""
        # Only a graph that is kept while k changes needs k from the carrier; an exported one has it as a constant.
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            return self._open_blocks_carrier.shape[0]
        return self._open_blocks

    @property
    def target_density(self) -> float:
        """The share of blocks that open when enough scores are positive; rounding to whole blocks included."""
        return self.open_blocks / self.grid.num_blocks

    def count_macs(self) -> int:
        """Multiply-adds of its network for one row."""
        return sum(weight.numel() for weight in (self.weight, self.hidden_weight) if weight is not None)

    def scores(self, x: Tensor) -> Tensor:
        """Raw scores (N, num_scores), before any ReLU of the gate kind, for x (N, in_features)."""
        self._check_input(x)
        key, network = self.key_of(x), self.network()
        if network.hidden_weight is not None:
            key = torch.relu(gate_scores(key, network.hidden_weight, network.hidden_bias, backend=self.backend))
        return gate_scores(key, network.weight, network.bias, backend=self.backend)

    def _check_input(self, x: Tensor) -> None:
        own = next((t for t in (*self._parameters.values(), *self._buffers.values()) if t is not None), x)
        if x.device != own.device or x.dim() != 2 or x.shape[1] != self.grid.in_features:
            expected = f"shape (rows, {self.grid.in_features}) on {own.device}"
            remedy = "Call the layer, which takes any leading dimensions."
            raise invalid("gate input", expected=expected, got=f"{tuple(x.shape)} on {x.device}", remedy=remedy)

    def key_of(self, x: Tensor) -> Tensor:
        """The features (N, key_size) that it reads of x (N, in_features)."""
        return x[:, self.key_offset : self.key_offset + self.key_size]

    def network(self) -> GateNetwork:
        """What is multiplied with the key: its parameters, or what a kind makes of them."""
        return GateNetwork(self.weight, self.bias, self.hidden_weight, self.hidden_bias)

    def copied(self) -> list[Tensor]:
        """The tensors of which `network` is a copy, or that native code copies; biases are read in place."""
        return [weight for weight in (self.weight, self.hidden_weight) if weight is not None]

    def observe(self, x: Tensor) -> None:
        """Told in training, once in every forward pass, of the rows x (N, in_features) that it decides on."""

    def dense(self, x: Tensor) -> Tensor:
        """All gates, (N, out_blocks, in_blocks), 0 where closed, for x (N, in_features)."""
        values, indices = self(x)
        gates: Tensor = values.new_zeros(len(x), self.grid.num_blocks).scatter(1, indices, values)
        return gates.view(len(x), self.grid.out_blocks, self.grid.in_blocks)

    def choices(self, x: Tensor) -> Tensor:
        """Scores (N, groups, size) for x (N, in_features): one group for each choice that the gate makes."""
        return self.scores(x).unsqueeze(1)

    def use(self, choices: Tensor, open_counts: Tensor) -> tuple[Tensor, Tensor]:
        """How evenly blocks are used, for the balance loss.

        Args:
            choices: (N, groups, size), from `choices`.
            open_counts: how often each block was open, (num_blocks).

        Returns:
            (groups, size) each: the share of every block in softmax(choices), which has a gradient, and in use.
        """
        share = torch.softmax(choices, -1).mean(0)
        counts = open_counts.view(share.shape).to(share.dtype)
        return share, counts / counts.sum(-1, keepdim=True).clamp(min=1)

    def reset_parameters(self) -> None:
        """Fresh weights: nn.Linear's and bias 0, so that half of the scores are positive; or those near dense."""
        if self._spec.near_dense:
            self.reset_near_dense()
        else:
            self._reset()

    def _reset(self) -> None:
        for weight, bias in self._layers():
            bound = 1 / math.sqrt(weight.shape[1])
            nn.init.uniform_(weight, -bound, bound)
            nn.init.zeros_(bias)
        self.count_change()

    def reset_near_dense(self, weight: Tensor | None = None) -> None:
        """Weights whose gates start close to 1, for a `weight` (out_features, in_features) trained without gates."""
        self._reset()
        for weight, bias in self._layers()[:1]:
            nn.init.normal_(weight, std=NEAR_DENSE_SPREAD / math.sqrt(weight.shape[1]))
            nn.init.ones_(bias)
        self._take(replace(self._spec, near_dense=True))
        self.count_change()

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        hidden = f", hidden={self.hidden_size}" if self.hidden_size else ""
        return f"{self.kind}, sparsity={self.target_sparsity:g}, key={self.key_offset}+{self.key_size}{hidden}"

    def _layers(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Weight and bias of each layer of the scoring network, the last layer first."""
        layers = [(self.weight, self.bias)] if self.num_scores else []
        if self.hidden_weight is not None and self.hidden_bias is not None:
            layers.append((self.hidden_weight, self.hidden_bias))
        return layers
