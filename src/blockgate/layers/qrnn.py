"""The Quasi-RNN of Bradbury et al. (2016), dense and gated: filters over the whole sequence, then a recurrence."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from blockgate.errors import invalid
from blockgate.grid import check_size
from blockgate.layers.dropout import check_share
from blockgate.layers.linear import DynamicSparseLinear
from blockgate.ops.forget_pool import forget_pool
from blockgate.runtime.exporting import NO_FORM, refuse_onnx_export

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["QRNN", "DynamicSparseQRNN", "QRNNState"]

# For each layer: its last state c (N, H), and its last input (N, in) where the window reaches back to it.
QRNNState = tuple[tuple[Tensor, "Tensor | None"], ...]

# How many parts a filter's output has: candidate and forget gate, and for fo-pooling an output gate.
POOLING = {"f": 2, "fo": 3}


class _QuasiRecurrent(nn.Module):
    """What the dense and the gated Quasi-RNN share: everything but the kind of filter."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        *,
        window: int | Sequence[int] = 2,
        output_size: int | None = None,
        pooling: str = "fo",
        zoneout: float = 0.0,
        **filter_options: Any,
    ) -> None:
        super().__init__()
        sizes = {"input_size": input_size, "hidden_size": hidden_size, "num_layers": num_layers}
        for name, size in (sizes | ({} if output_size is None else {"output_size": output_size})).items():
            check_size(name, size)
        check_share("dropout", dropout)
        check_share("zoneout", zoneout)
        if pooling not in POOLING:
            raise invalid("pooling", expected=f"one of {tuple(POOLING)}", got=pooling, remedy="The paper uses 'fo'.")
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.output_size = hidden_size if output_size is None else output_size
        self.windows = _windows_of(window, num_layers)
        self.batch_first, self.dropout, self.zoneout, self.pooling = batch_first, dropout, zoneout, pooling
        outputs = [*[hidden_size] * (num_layers - 1), self.output_size]
        inputs = [input_size, *outputs[:-1]]
        self.filters = nn.ModuleList(
            self._make_filter(size * width, POOLING[pooling] * out, bias, **filter_options)
            for size, width, out in zip(inputs, self.windows, outputs, strict=True)
        )

    @abstractmethod
    def _make_filter(self, in_features: int, out_features: int, bias: bool, **options: Any) -> nn.Module:
        """The linear layer that makes a layer's candidates and gates from a window of its input."""

    def forward(self, x: Tensor, state: QRNNState | None = None) -> tuple[Tensor, QRNNState]:
        """Output for every step, and the state to carry on from.

        Args:
            x: (T, N, input_size), (N, T, input_size) with batch_first, or unbatched (T, input_size).
            state: what an earlier call returned; None to start from zeros.
        """
        self._check_input(x, state)
        refuse_onnx_export("a Quasi-RNN", NO_FORM)
        unbatched = x.dim() == 2
        if unbatched:
            x = x.unsqueeze(1)
        elif self.batch_first:
            x = x.transpose(0, 1)
        states = []
        for layer in range(self.num_layers):
            carried = None if state is None else state[layer]
            x, new = self._run_layer(layer, x, carried)
            states.append(new)
            if layer < self.num_layers - 1:
                x = nn.functional.dropout(x, self.dropout, self.training)
        if unbatched:
            x = x.squeeze(1)
        elif self.batch_first:
            x = x.transpose(0, 1)
        return x, tuple(states)

    def _run_layer(
        self, layer: int, x: Tensor, carried: tuple[Tensor, Tensor | None] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
        """One layer over the whole sequence x (T, N, in): its output (T, N, out) and its new state."""
        window = x
        if self.windows[layer] == 2:
            last = x.new_zeros(x.shape[1:]) if carried is None else cast("Tensor", carried[1])
            # x_t comes first, so that a gate's key is read from it.
            window = torch.cat([x, torch.cat([last.unsqueeze(0), x[:-1]])], dim=-1)
        parts = self.filters[layer](window).chunk(POOLING[self.pooling], dim=-1)
        candidate, forget = torch.tanh(parts[0]), torch.sigmoid(parts[1])
        if self.zoneout:
            forget = 1 - (1 - forget) * self._zoneout_mask(forget)
        initial = candidate.new_zeros(candidate.shape[1:]) if carried is None else carried[0]
        backend = getattr(self.filters[layer], "backend", "auto")
        states = forget_pool(candidate, forget, initial, backend=backend)
        output = states if self.pooling == "f" else torch.sigmoid(parts[2]) * states
        return output, (states[-1], x[-1] if self.windows[layer] == 2 else None)

    def _zoneout_mask(self, like: Tensor) -> Tensor | float:
        """0 where a state is left alone in training; in eval the share that is not."""
        if not self.training:
            return 1 - self.zoneout
        return torch.bernoulli(torch.full_like(like, 1 - self.zoneout))

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return (
            f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}, window={self.windows}, "
            f"output_size={self.output_size}, pooling={self.pooling}"
        )

    def _check_input(self, x: Tensor, state: QRNNState | None) -> None:
        if x.dim() not in {2, 3} or x.shape[-1] != self.input_size or x.numel() == 0:
            layout = "(batch, time" if self.batch_first else "(time, batch"
            raise invalid(
                "input",
                expected=f"shape {layout}, {self.input_size}) or (time, {self.input_size}), with at least one step",
                got=tuple(x.shape),
                remedy="The last dimension must be input_size.",
            )
        if state is not None and len(state) != self.num_layers:
            raise invalid(
                "state",
                expected=f"one entry for each of {self.num_layers} layers",
                got=len(state),
                remedy="Pass on what the last call returned.",
            )


class QRNN(_QuasiRecurrent):
    """A dense Quasi-RNN: filters over windows of the input, candidates averaged over time by forget gates.

    Args:
        input_size: features of the input.
        hidden_size: features of every layer but perhaps the last.
        num_layers: how many layers.
        bias: whether filters have a bias.
        batch_first: whether input and output are (batch, time, features).
        dropout: between layers, in training.
        window: 1 (x_t) or 2 (x_t and x_{t-1}), for all layers or one per layer.
        output_size: features of the last layer; hidden_size if None.
        pooling: "fo" (forget and output gate) or "f" (forget gate only).
        zoneout: share of states that a step of training leaves as they are.
        device: of the parameters.
        dtype: of the parameters.
    """

    def _make_filter(self, in_features: int, out_features: int, bias: bool, **options: Any) -> nn.Module:
        return nn.Linear(in_features, out_features, bias, **options)


class DynamicSparseQRNN(_QuasiRecurrent):
    """A Quasi-RNN whose filters are gated block by block, for every step of every sequence.

    Args as in `QRNN`, and the keyword options of `DynamicSparseLinear` (block_size, sparsity, key_size, ...). With
    window 2 the gate reads x_t.
    """

    def _make_filter(self, in_features: int, out_features: int, bias: bool, **options: Any) -> nn.Module:
        return DynamicSparseLinear(in_features, out_features, bias, **options)

    @classmethod
    def from_dense(cls, qrnn: QRNN, **options: Any) -> DynamicSparseQRNN:
        """A gated Quasi-RNN around a trained dense one: the same Parameter objects, and gates that start near 1."""
        if not isinstance(qrnn, QRNN):
            raise invalid("from_dense", expected="a QRNN", got=type(qrnn).__name__, remedy="Pass the dense layer.")
        dense = [cast("nn.Linear", f) for f in qrnn.filters]
        made = cls(
            qrnn.input_size,
            qrnn.hidden_size,
            qrnn.num_layers,
            batch_first=qrnn.batch_first,
            dropout=qrnn.dropout,
            window=qrnn.windows,
            output_size=qrnn.output_size,
            pooling=qrnn.pooling,
            zoneout=qrnn.zoneout,
            **{**options, "device": "meta"},
        )
        made.filters = nn.ModuleList(DynamicSparseLinear.from_dense(linear, **options) for linear in dense)
        return made.train(qrnn.training)


def _windows_of(window: int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    windows = (window,) * num_layers if isinstance(window, int) else tuple(window)
    if len(windows) != num_layers or not set(windows) <= {1, 2}:
        raise invalid(
            "window", expected=f"1 or 2, or {num_layers} of them", got=window, remedy="The paper: 2, 1, 1, 1."
        )
    return windows
