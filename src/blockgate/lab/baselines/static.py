"""Layers with a fixed pattern of open blocks: what remains of the method when no gate looks at the input."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from blockgate.grid import BlockGrid
from blockgate.lab.baselines.matrices import MATRICES, Matrices
from blockgate.lab.baselines.patterns import PATTERNS, expand_blocks
from blockgate.layers import QRNN

__all__ = ["StaticBlockLSTM", "StaticBlockLinear", "StaticBlockQRNN"]


class StaticBlockLinear(nn.Linear):
    """nn.Linear with blocks that are closed for good, spread evenly over the weight or drawn at random.

    Training computes the dense product with a masked weight; `to_block_inference` computes only open blocks.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        bias: whether to add a bias.
        block_size: one int for square blocks, or (out, in).
        sparsity: share of blocks that are closed, in [0, 1).
        pattern: one of PATTERNS, which says where they are.
        place: device and dtype.
    """

    pattern: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        block_size: int | tuple[int, int] = 128,
        sparsity: float = 0.5,
        pattern: str = "even",
        **place: Any,
    ) -> None:
        self.grid = BlockGrid(out_features, in_features, block_size)
        super().__init__(in_features, out_features, bias, **place)
        self.register_buffer("pattern", PATTERNS[pattern](self.grid, sparsity).to(self.weight.device))
        # Closed blocks never get a gradient, so that they stay zero, and can be counted.
        self.weight.data.mul_(self.mask())

    def forward(self, x: Tensor) -> Tensor:
        """y (..., out_features) for x (..., in_features)."""
        return F.linear(x, self.weight * self.mask(), self.bias)

    def mask(self) -> Tensor:
        """The open blocks as a mask (out_features, in_features)."""
        return expand_blocks(self.pattern, self.grid)

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return f"{super().extra_repr()}, block_size={self.grid.block}, open={int(self.pattern.sum())}"


class StaticBlockLSTM(nn.LSTM):
    """nn.LSTM with blocks of its matrices closed for good, spread evenly over each or drawn at random.

    Args:
        input_size: features of the input.
        hidden_size: features of h and c.
        num_layers: how many layers.
        block_size: one int for square blocks, or (out, in).
        sparsity: share of blocks of each matrix that are closed, in [0, 1).
        pattern: one of PATTERNS.
        options: the other options of nn.LSTM.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        block_size: int | tuple[int, int] = 128,
        sparsity: float = 0.5,
        pattern: str = "even",
        **options: Any,
    ) -> None:
        super().__init__(input_size, hidden_size, num_layers, **options)
        self.grids = {
            name: BlockGrid(weight.shape[0], weight.shape[1], block_size)
            for name, weight in self.named_parameters()
            if weight.dim() == 2
        }
        for name, grid in self.grids.items():
            weight = self.get_parameter(name)
            self.register_buffer(_pattern_name(name), PATTERNS[pattern](grid, sparsity).to(weight.device))
            weight.data.mul_(self.mask(name))

    def mask(self, weight: str) -> Tensor:
        """The open blocks of a matrix as a mask of its size, by the name of its weight."""
        return expand_blocks(self.get_buffer(_pattern_name(weight)), self.grids[weight])

    def forward(self, *args: Any, **options: Any) -> Any:
        """As nn.LSTM."""
        # As in `weight_drop_`: for the time of this call, attributes of the instance stand in for the parameters. What
        # stands there already is a copy with dropped entries.
        before = {name: self.__dict__.get(name) for name in self.grids}
        self.__dict__.update({name: getattr(self, name) * self.mask(name) for name in self.grids})
        self._follow_names()
        try:
            return super().forward(*args, **options)
        finally:
            for name, shadow in before.items():
                if shadow is None:
                    del self.__dict__[name]
                else:
                    self.__dict__[name] = shadow
            self._follow_names()

    def _follow_names(self) -> None:
        """nn.LSTM reads its weights from a list instead of by name."""
        self._flat_weights = [getattr(self, name) for name in self._flat_weights_names]


class StaticBlockQRNN(QRNN):
    """A Quasi-RNN whose filters are `StaticBlockLinear`.

    Args as in `QRNN`, and block_size and sparsity.
    """

    def _make_filter(self, in_features: int, out_features: int, bias: bool, **options: Any) -> nn.Module:
        return StaticBlockLinear(in_features, out_features, bias, **options)


def _pattern_name(weight: str) -> str:
    return weight.replace("weight", "pattern", 1)


def _matrices(pattern: str) -> Matrices:
    return Matrices(
        linear=StaticBlockLinear,
        lstm=StaticBlockLSTM,
        qrnn=StaticBlockQRNN,
        options=lambda gate: {"block_size": gate.block_size, "sparsity": gate.sparsity, "pattern": pattern},
    )


MATRICES["static"] = _matrices("even")
MATRICES["random"] = _matrices("random")
