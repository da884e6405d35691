"""LSTMs that hold nothing but packed blocks, gated or dense: what `pack` makes of them, for inference."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from blockgate.runtime.packed import PackedLinear
from blockgate.runtime.prepared import FusedDense, FusedLSTM, Renewed, for_inference, is_plain
from blockgate.runtime.recurrent import LSTMInterface, LSTMState, Segments, recur, run_layers, step_by_step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

__all__ = ["PackedLSTM"]


class PackedLSTM(LSTMInterface):
    """nn.LSTM or DynamicSparseLSTM on packed blocks, for inference; made by `pack`.

    Its matrices `ih_l0`, `hh_l0`, ... are packed linear layers. Checkpoints of the unpacked LSTM load too.

    Args:
        matrices: by name, `ih_l0` (4H, input_size), `hh_l0` (4H, H), ... in this order.
        batch_first: whether input and output are (batch, time, features).
    """

    def __init__(self, matrices: Mapping[str, PackedLinear], batch_first: bool) -> None:
        first, recurrent, *_ = matrices.values()
        super().__init__(first.in_features, recurrent.in_features, len(matrices) // 2, batch_first)
        for name, matrix in matrices.items():
            self.add_module(name, matrix)
        self._prepared: Renewed[FusedLSTM] = Renewed()
        self.train(False)

    def train(self, mode: bool = True) -> Self:  # noqa: ARG002
        """Packed layers are for inference: they stay in eval mode, whatever the model around them does."""
        return super().train(False)

    def extra_repr(self) -> str:
        """The sizes, for print(model)."""
        return f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}, batch_first={self.batch_first}"

    def forward(
        self, x: Tensor | PackedSequence, hx: LSTMState | None = None
    ) -> tuple[Tensor | PackedSequence, LSTMState]:
        """Output for every step, and the state after the last one, in nn.LSTM's shapes."""
        if type(x) is Tensor and x.dim() == 3 and not self.batch_first:
            # One token at a time, every call counts: the fused op takes this layout as it is.
            self._check_sequence(x)
            state = self._initial(hx, x.shape[1], x)
            if fused := self._follow_weights(x, state):
                return fused(x, state)
        return super().forward(x, hx)

    def _run(self, rows: Tensor, segments: Segments, state: LSTMState) -> tuple[Tensor, LSTMState]:
        if fused := self._follow_weights(rows, state):
            return recur(rows, segments, state, fused)
        layers = [
            (self._matrix("ih", layer), partial(step_by_step, product=self._matrix("hh", layer)))
            for layer in range(self.num_layers)
        ]
        return run_layers(rows, segments, state, layers)

    def _matrix(self, part: str, layer: int) -> PackedLinear:
        return cast("PackedLinear", self._modules[f"{part}_l{layer}"])

    def _matrices(self) -> list[PackedLinear]:
        return [self._matrix(part, layer) for layer in range(self.num_layers) for part in ("ih", "hh")]

    def _follow_weights(self, rows: Tensor, state: LSTMState) -> FusedLSTM | None:
        """The layers prepared for the fused op, anew when anything of them has changed; None if it can't serve."""
        if not for_inference(rows) or any(s.dtype != torch.float32 for s in state):
            return None
        sources: list[Tensor | None] = []
        options: list[Any] = []
        for matrix in self._matrices():
            gate = matrix._modules.get("gate")
            if matrix._forward_hooks or matrix._forward_pre_hooks or not (gate is None or is_plain(gate)):
                return None
            sources += (*matrix.packed._buffers.values(), *matrix._parameters.values())
            if gate is not None:
                sources += gate._parameters.values()
                options += (id(gate), gate.key_offset, gate.key_size, gate.groups, gate.normalise)
        return self._prepared.get(sources, options, self._prepare)

    def _prepare(self) -> FusedLSTM | None:
        matrices = [matrix.prepare() for matrix in self._matrices()]
        if any(matrix is None for matrix in matrices):
            return None
        gates = [matrix._modules.get("gate") for matrix in self._matrices()]
        return FusedLSTM(cast("list[FusedDense]", matrices), gates)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._prepared.drop()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A checkpoint of the unpacked LSTM has `weight_ih_l0`: hand it to the matrix `ih_l0`, which packs it.
        for key in list(state_dict):
            what, _, rest = key.removeprefix(prefix).partition("_")
            name, *below = rest.split(".")
            if key.startswith(prefix) and what in {"weight", "bias", "gate"} and name in self._modules:
                state_dict[".".join([prefix + name, what, *below])] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)
