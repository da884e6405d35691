"""LSTMs whose matrices are gated block by block, at every step of every sequence: drop-in for torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from blockgate.errors import invalid
from blockgate.grid import check_size
from blockgate.layers.dropout import check_share
from blockgate.layers.lstm_stack import GatedLSTMStack
from blockgate.runtime.block_linear import check_rows
from blockgate.runtime.recurrent import LSTMInterface, LSTMState, Segments, check_state, no_state
from blockgate.spec import GateSpec

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from blockgate.runtime.plan import Plan
    from blockgate.spec import GateOptions

__all__ = ["DynamicSparseLSTM", "DynamicSparseLSTMCell"]


class DynamicSparseLSTM(LSTMInterface, GatedLSTMStack):
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
        bidirectional: False; two directions are not implemented.
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
        for name, size in {"input_size": input_size, "hidden_size": hidden_size, "num_layers": num_layers}.items():
            check_size(name, size)
        if bidirectional or proj_size:
            raise invalid(
                "DynamicSparseLSTM",
                expected="one direction and no projection",
                got=f"bidirectional={bidirectional}, proj_size={proj_size}",
                remedy="Run two layers, one on the reversed sequence, or add a linear layer.",
            )
        super().__init__(input_size, hidden_size, num_layers, batch_first)
        self.bias = bias
        self.dropout = check_share("dropout", dropout)
        spec, place = GateSpec.of(spec, options), {"device": device, "dtype": dtype}
        for layer in range(num_layers):
            self._add_layer(f"_l{layer}", hidden_size if layer else input_size, hidden_size, bias, spec, place)
        self._reset_dense(hidden_size)

    @classmethod
    def from_dense(cls, lstm: nn.LSTM, **options: Any) -> DynamicSparseLSTM:
        """A gated LSTM around a trained nn.LSTM: the same Parameter objects, and gates that start near 1."""
        if not isinstance(lstm, nn.LSTM):
            raise invalid("from_dense", expected="an nn.LSTM", got=type(lstm).__name__, remedy="Pass the dense layer.")
        sizes = (lstm.input_size, lstm.hidden_size, lstm.num_layers, lstm.bias, lstm.batch_first, lstm.dropout)
        made = cls(*sizes, lstm.bidirectional, lstm.proj_size, **_like_dense(lstm, options))
        return made._take_dense(lstm)

    def reset_parameters(self) -> None:
        """Fresh weights: nn.LSTM's, and those of the gates."""
        self._reset_dense(self.hidden_size)
        self._reset_gates()

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return (
            f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}, bias={self.bias}, "
            f"batch_first={self.batch_first}, dropout={self.dropout}, {self._grid_repr()}"
        )

    def _run(self, rows: Tensor, segments: Segments, state: LSTMState) -> tuple[Tensor, LSTMState]:
        return self._run_stack(rows, segments, state, self.dropout)

    def plan(self, x: Tensor | PackedSequence, hx: LSTMState | None = None) -> Plan:
        """Which path `forward` takes for this input now, and why."""
        return self._plan_stack(x.data if isinstance(x, PackedSequence) else x, hx, self.dropout)


class DynamicSparseLSTMCell(GatedLSTMStack):
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
        super().__init__()
        self.input_size = check_size("input_size", input_size)
        self.hidden_size = check_size("hidden_size", hidden_size)
        self.bias = bias
        spec, place = GateSpec.of(spec, options), {"device": device, "dtype": dtype}
        self._add_layer("", input_size, hidden_size, bias, spec, place)
        self._reset_dense(hidden_size)

    @classmethod
    def from_dense(cls, cell: nn.LSTMCell, **options: Any) -> DynamicSparseLSTMCell:
        """A gated cell around a trained nn.LSTMCell: the same Parameter objects, and gates that start near 1."""
        if not isinstance(cell, nn.LSTMCell):
            raise invalid("from_dense", expected="an nn.LSTMCell", got=type(cell).__name__, remedy="Pass the cell.")
        made = cls(cell.input_size, cell.hidden_size, cell.bias, **_like_dense(cell, options))
        return made._take_dense(cell)

    def forward(self, x: Tensor, hx: LSTMState | None = None) -> LSTMState:
        """New h and c, (N, hidden_size) each, from x (N, input_size) and the old ones; or all without the N."""
        check_rows(x, self.input_size)
        if x.dim() > 2:
            raise invalid(
                "input",
                expected=f"shape (batch, {self.input_size}) or ({self.input_size},)",
                got=tuple(x.shape),
                remedy="A cell makes one step; DynamicSparseLSTM runs sequences.",
            )
        lead = x.shape[:-1]
        shape = (*lead, self.hidden_size)
        h, c = no_state(shape, x) if hx is None else check_state(hx, shape)
        rows = x.reshape(-1, self.input_size)
        state = (h.reshape(1, -1, self.hidden_size), c.reshape(1, -1, self.hidden_size))
        _, (h, c) = self._run_stack(rows, [(1, rows.shape[0])], state)
        return h.view(shape), c.view(shape)

    def plan(self, x: Tensor, hx: LSTMState | None = None) -> Plan:
        """Which path `forward` takes for this input now, and why."""
        return self._plan_stack(x, hx)

    def reset_parameters(self) -> None:
        """Fresh weights: nn.LSTMCell's, and those of the gates."""
        self._reset_dense(self.hidden_size)
        self._reset_gates()

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return f"{self.input_size}, {self.hidden_size}, bias={self.bias}, {self._grid_repr()}"


def _like_dense(dense: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """The options, with device and type of the dense layer where they don't say otherwise."""
    weight = next(dense.parameters())
    return {"device": weight.device, "dtype": weight.dtype, **options}
