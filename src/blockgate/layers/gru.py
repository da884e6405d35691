"""GRUs whose matrices are gated block by block, at every step of every sequence: drop-in for torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from blockgate.errors import invalid
from blockgate.layers.recurrent_stack import GatedCell, GatedLayers
from blockgate.runtime.cells import GRU
from blockgate.runtime.recurrent import GRUInterface
from blockgate.spec import GateSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from typing_extensions import Unpack

    from blockgate.spec import GateOptions

__all__ = ["DynamicSparseGRU", "DynamicSparseGRUCell"]


class DynamicSparseGRU(GatedLayers, GRUInterface):
    """Drop-in for nn.GRU: the matrices from the input and from the last state each have a gate over their blocks.

    Weights and biases have nn.GRU's names, shapes and meaning (`weight_ih_l0`, ...), so its checkpoints load; the gates
    `gate_ih_l0`, `gate_hh_l0`, ... come in addition. They read x_t and h_{t-1}.

    Args:
        input_size: features of the input.
        hidden_size: features of h.
        num_layers: how many layers.
        bias: whether to add biases.
        batch_first: whether input and output are (batch, time, features).
        dropout: between layers, in training.
        bidirectional: whether every layer also runs from the end of the sequence, with matrices and gates of its own
            (`weight_ih_l0_reverse`, ...); the outputs of both directions stand side by side.
        spec: the options of all matrices as one object.
        device: of the parameters.
        dtype: of the parameters.
        options: the keyword options of `DynamicSparseLinear` (block_size, sparsity, key_size, ...), for all matrices.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        spec: GateSpec | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        spec, place = GateSpec.of(spec, options), {"device": device, "dtype": dtype}
        sizes = (input_size, hidden_size, num_layers)
        super().__init__(*sizes, bias, batch_first, dropout, bidirectional, spec, place)

    @classmethod
    def from_dense(cls, gru: nn.GRU, **options: Any) -> DynamicSparseGRU:
        """A gated GRU around a trained nn.GRU: the same Parameter objects, and gates that start near 1."""
        if not isinstance(gru, nn.GRU):
            raise invalid("from_dense", expected="an nn.GRU", got=type(gru).__name__, remedy="Pass the dense layer.")
        return cls._from_dense(gru, options)


class DynamicSparseGRUCell(GatedCell):
    """Drop-in for nn.GRUCell: one step of a gated GRU layer.

    Args:
        input_size: features of the input.
        hidden_size: features of h.
        bias: whether to add biases.
        spec: the options of both matrices as one object.
        device: of the parameters.
        dtype: of the parameters.
        options: the keyword options of `DynamicSparseLinear` (block_size, sparsity, key_size, ...), for both matrices.
    """

    cell = GRU

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        spec: GateSpec | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        place = {"device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, bias, GateSpec.of(spec, options), place)

    @classmethod
    def from_dense(cls, cell: nn.GRUCell, **options: Any) -> DynamicSparseGRUCell:
        """A gated cell around a trained nn.GRUCell: the same Parameter objects, and gates that start near 1."""
        if not isinstance(cell, nn.GRUCell):
            raise invalid("from_dense", expected="an nn.GRUCell", got=type(cell).__name__, remedy="Pass the cell.")
        return cls._from_dense(cell, options)

    def forward(self, x: Tensor, hx: Tensor | None = None) -> Tensor:
        """New h (N, hidden_size), from x (N, input_size) and the old one; or both without the N."""
        return self._step(x, hx)  # type: ignore[no-any-return]
