"""LSTMs whose matrices are gated block by block, at every step of every sequence: drop-in for torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from blockgate.errors import invalid
from blockgate.layers.recurrent_stack import GatedCell, GatedLayers
from blockgate.runtime.cells import LSTM
from blockgate.runtime.recurrent import LSTMInterface
from blockgate.spec import GateSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from typing_extensions import Unpack

    from blockgate.runtime.cells import LSTMState
    from blockgate.spec import GateOptions

__all__ = ["DynamicSparseLSTM", "DynamicSparseLSTMCell"]


class DynamicSparseLSTM(GatedLayers, LSTMInterface):
    """Drop-in for nn.LSTM: the matrices from the input and from the last state each have a gate over their blocks.

    Weights and biases have nn.LSTM's names, shapes and meaning (`weight_ih_l0`, ...), so its checkpoints load; the
    gates `gate_ih_l0`, `gate_hh_l0`, ... come in addition. They read x_t and h_{t-1}.

    Args:
        input_size: features of the input.
        hidden_size: features of h and c.
        num_layers: how many layers.
        bias: whether to add biases.
        batch_first: whether input and output are (batch, time, features).
        dropout: between layers, in training.
        bidirectional: whether every layer also runs from the end of the sequence, with matrices and gates of its own
            (`weight_ih_l0_reverse`, ...); the outputs of both directions stand side by side.
        proj_size: 0; projections are not implemented.
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
        proj_size: int = 0,
        *,
        spec: GateSpec | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        if proj_size:
            raise invalid("DynamicSparseLSTM", expected="no projection", got=f"proj_size={proj_size}", remedy=REMEDY)
        spec, place = GateSpec.of(spec, options), {"device": device, "dtype": dtype}
        sizes = (input_size, hidden_size, num_layers)
        super().__init__(*sizes, bias, batch_first, dropout, bidirectional, spec, place)

    @classmethod
    def from_dense(cls, lstm: nn.LSTM, **options: Any) -> DynamicSparseLSTM:
        """A gated LSTM around a trained nn.LSTM: the same Parameter objects, and gates that start near 1."""
        if not isinstance(lstm, nn.LSTM):
            raise invalid("from_dense", expected="an nn.LSTM", got=type(lstm).__name__, remedy="Pass the dense layer.")
        if lstm.proj_size:
            got = f"proj_size={lstm.proj_size}"
            raise invalid("from_dense", expected="an LSTM with no projection", got=got, remedy=REMEDY)
        return cls._from_dense(lstm, options)


REMEDY = "Add a linear layer after the LSTM."


class DynamicSparseLSTMCell(GatedCell):
    """Drop-in for nn.LSTMCell: one step of a gated LSTM layer.

    Args:
        input_size: features of the input.
        hidden_size: features of h and c.
        bias: whether to add biases.
        spec: the options of both matrices as one object.
        device: of the parameters.
        dtype: of the parameters.
        options: the keyword options of `DynamicSparseLinear` (block_size, sparsity, key_size, ...), for both matrices.
    """

    cell = LSTM

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
    def from_dense(cls, cell: nn.LSTMCell, **options: Any) -> DynamicSparseLSTMCell:
        """A gated cell around a trained nn.LSTMCell: the same Parameter objects, and gates that start near 1."""
        if not isinstance(cell, nn.LSTMCell):
            raise invalid("from_dense", expected="an nn.LSTMCell", got=type(cell).__name__, remedy="Pass the cell.")
        return cls._from_dense(cell, options)

    def forward(self, x: Tensor, hx: LSTMState | None = None) -> LSTMState:
        """New h and c, (N, hidden_size) each, from x (N, input_size) and the old ones; or all without the N."""
        return self._step(x, hx)  # type: ignore[no-any-return]
