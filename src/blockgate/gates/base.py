"""What all gates share: the part of the input they read, the small network that scores blocks, the sparsity."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from types import EllipsisType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from blockgate.errors import BlockgateError, invalid
from blockgate.grid import BlockGrid, as_int, check_size, check_sparsity
from blockgate.ops import check_backend, gate_scores

__all__ = ["DEFAULT_KEY_SIZE", "Gate"]

DEFAULT_KEY_SIZE = 128

# How far a gate made for a trained dense layer starts from the value 1, in standard deviations for a unit input.
NEAR_DENSE_SPREAD = 0.02


class Gate(nn.Module, ABC):
    """Decides, for every row of the input, which blocks of a grid open and how wide.

    Calling a gate with x (N, in_features) returns compact gates: values (N, E), 0 where closed, and the index of the
    block each belongs to (N, E). Values are float32 or wider, whatever the type of x.

    Args:
        grid: the grid whose blocks it opens.
        num_scores: outputs of its scoring network.
        sparsity: share of blocks that stay closed, in [0, 1).
        key_size: how many input features it reads. Unset: min(128, what there is); None: all from `key_offset` on.
        key_offset: the first feature it reads.
        gate_hidden: width of a hidden ReLU layer between key and scores; None for none.
        backend: see `blockgate.ops.BACKENDS`.
        device: of the parameters.
        dtype: of the parameters.
    """

    kind: ClassVar[str]

    weight: nn.Parameter
    bias: nn.Parameter
    hidden_weight: nn.Parameter | None
    hidden_bias: nn.Parameter | None

    def __init__(
        self,
        grid: BlockGrid,
        num_scores: int,
        *,
        sparsity: float,
        key_size: int | EllipsisType | None = ...,
        key_offset: int = 0,
        gate_hidden: int | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.grid = grid
        self.num_scores = num_scores
        self.key_offset, self.key_size = _check_key(grid.in_features, key_offset, key_size)
        self.backend = check_backend(backend)
        self.hidden_size = 0 if gate_hidden is None else check_size("gate_hidden", gate_hidden)
        scored = self.hidden_size or self.key_size
        self.weight = nn.Parameter(torch.empty(num_scores, scored, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_scores, device=device, dtype=dtype))
        hidden_weight = hidden_bias = None
        if gate_hidden is not None:
            hidden_weight = nn.Parameter(torch.empty(self.hidden_size, self.key_size, device=device, dtype=dtype))
            hidden_bias = nn.Parameter(torch.empty(self.hidden_size, device=device, dtype=dtype))
        self.register_parameter("hidden_weight", hidden_weight)
        self.register_parameter("hidden_bias", hidden_bias)
        self.target_sparsity = sparsity
        self.reset_parameters()

    @abstractmethod
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compact gates and block indices, (N, E) each, for x (N, in_features)."""

    @abstractmethod
    def count_open(self, sparsity: float) -> int:
        """How many blocks (per group, where the gate chooses in groups) a sparsity opens; raises if it can't."""

    @property
    def target_sparsity(self) -> float:
        """The share of blocks that is to stay closed. May change at any time."""
        return self._sparsity

    @target_sparsity.setter
    def target_sparsity(self, sparsity: float) -> None:
        open_blocks = self.count_open(check_sparsity(sparsity))
        self._sparsity = float(sparsity)
        self._open_blocks = open_blocks
        self._open_blocks_carrier = _carry(open_blocks)

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

    def scores(self, x: Tensor) -> Tensor:
        """Raw scores (N, num_scores), before any ReLU of the gate kind, for x (N, in_features)."""
        if x.device != self.weight.device or x.dim() != 2 or x.shape[1] != self.grid.in_features:
            raise invalid(
                "gate input",
                expected=f"shape (rows, {self.grid.in_features}) on {self.weight.device}",
                got=f"{tuple(x.shape)} on {x.device}",
                remedy="Call the layer, which takes any leading dimensions.",
            )
        key = x[:, self.key_offset : self.key_offset + self.key_size]
        if self.hidden_weight is not None:
            key = torch.relu(gate_scores(key, self.hidden_weight, self.hidden_bias, backend=self.backend))
        return gate_scores(key, self.weight, self.bias, backend=self.backend)

    def dense(self, x: Tensor) -> Tensor:
        """All gates, (N, out_blocks, in_blocks), 0 where closed, for x (N, in_features)."""
        values, indices = self(x)
        gates: Tensor = values.new_zeros(x.shape[0], self.grid.num_blocks).scatter(1, indices, values)
        return gates.view(x.shape[0], self.grid.out_blocks, self.grid.in_blocks)

    def reset_parameters(self) -> None:
        """Fresh weights: as in nn.Linear, with bias 0, so that about half of the scores are positive at first."""
        for weight, bias in self._layers():
            bound = 1 / math.sqrt(weight.shape[1])
            nn.init.uniform_(weight, -bound, bound)
            nn.init.zeros_(bias)

    def reset_near_dense(self) -> None:
        """Weights whose gates start close to 1, for a weight matrix that was trained without gates."""
        self.reset_parameters()
        nn.init.normal_(self.weight, std=NEAR_DENSE_SPREAD / math.sqrt(self.weight.shape[1]))
        nn.init.ones_(self.bias)

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        hidden = f", hidden={self.hidden_size}" if self.hidden_size else ""
        return f"{self.kind}, sparsity={self.target_sparsity:g}, key={self.key_offset}+{self.key_size}{hidden}"

    def _layers(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Weight and bias of each layer of the scoring network, the last layer first."""
        layers = [(self.weight, self.bias)]
        if self.hidden_weight is not None and self.hidden_bias is not None:
            layers.append((self.hidden_weight, self.hidden_bias))
        return layers

    # The sparsity belongs in checkpoints, but it is no buffer: `.half()` must not round it, and data-parallel
    # training must not broadcast it.

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "sparsity"] = torch.tensor(self.target_sparsity, dtype=torch.float64, device="cpu")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        sparsity = state_dict.pop(prefix + "sparsity", None)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if sparsity is None or (isinstance(sparsity, Tensor) and sparsity.is_meta):
            return
        try:
            self.target_sparsity = float(sparsity)
        except (BlockgateError, TypeError, ValueError, RuntimeError) as error:
            # The last argument collects what load_state_dict then raises, with every other fault of the checkpoint.
            args[-1].append(f"{prefix}sparsity: {error}")


def _carry(number: int) -> Tensor:
    """A tensor without memory whose length is `number`.

    torch.compile takes an int of a module for a constant and compiles anew whenever it changes; the length of a tensor
    can be a variable of the graph. Marking it says so before the compiler asks, for every length from 1 on; a model
    that was made before the compiler was imported is marked when its sparsity first changes.
    """
    carrier = torch.empty(number, 0, device="cpu")
    if dynamo := sys.modules.get("torch._dynamo.decorators"):
        dynamo.mark_unbacked(carrier, 0)
    return carrier


def _check_key(in_features: int, offset: int, size: int | EllipsisType | None) -> tuple[int, int]:
    """Offset and size of the key, resolved and checked against the input's size."""
    first = as_int(offset)
    if first is None or not 0 <= first < in_features:
        raise invalid(
            "key_offset", expected=f"an int from 0 to {in_features - 1}", got=offset, remedy="It must lie in the input."
        )
    rest = in_features - first
    if size is None:
        return first, rest
    if isinstance(size, EllipsisType):
        return first, min(DEFAULT_KEY_SIZE, rest)
    length = as_int(size)
    if length is None or not 0 < length <= rest:
        raise invalid(
            "key_size",
            expected=f"an int from 1 to {rest} (in_features {in_features} - key_offset {offset})",
            got=size,
            remedy="Pass None to read the whole input.",
        )
    return first, length
