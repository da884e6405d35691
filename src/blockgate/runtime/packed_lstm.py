"""LSTMs that hold nothing but packed blocks, gated or dense: what `pack` makes of them, for inference."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from blockgate.runtime.packed import PackedLinear
from blockgate.runtime.plan import (
    FUSED,
    GRADIENTS,
    LAYER_HOOKS,
    OPS,
    STATE_TYPE,
    STEPS,
    Plan,
    Refusal,
    input_refusal,
    slower_path,
)
from blockgate.runtime.prepared import (
    PreparedLinear,
    PreparedLSTM,
)
from blockgate.runtime.recurrent import (
    LSTMInterface,
    LSTMState,
    Segments,
    matrix_names,
    recur,
    run_layers,
    step_by_step,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

__all__ = ["PackedLSTM"]

# The prepared matrices of an LSTM, and the stack that was made of them: written as one, so that threads see a pair.
Stack: TypeAlias = "tuple[list[PreparedLinear | Refusal], PreparedLSTM | Refusal]"
NO_STACK: Stack = ([], LAYER_HOOKS)


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
        self._stack = NO_STACK
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
            fused = self._fused(x, state)
            if type(fused) is PreparedLSTM:
                return fused(x, state)
        return super().forward(x, hx)

    def plan(self, x: Tensor | PackedSequence, hx: LSTMState | None = None) -> Plan:
        """Which path `forward` takes for this input now, and why."""
        rows = x.data if isinstance(x, PackedSequence) else x
        fused = self._fused(rows, hx or ())
        if not isinstance(fused, Refusal):
            return Plan(FUSED)
        plan = slower_path(fused, rows, "auto")
        return plan._replace(path=STEPS) if plan.path == OPS else plan

    def repack(self) -> None:
        """Forgets what is prepared for native calls; needed after writing parameters by hand."""
        for matrix in self._matrices():
            matrix.repack()

    def _run(self, rows: Tensor, segments: Segments, state: LSTMState) -> tuple[Tensor, LSTMState]:
        fused = self._fused(rows, state)
        if type(fused) is PreparedLSTM:
            return recur(rows, segments, state, fused)
        layers = [
            (self._matrix("ih", layer), partial(step_by_step, product=self._matrix("hh", layer)))
            for layer in range(self.num_layers)
        ]
        return run_layers(rows, segments, state, layers)

    def _matrix(self, part: str, layer: int) -> PackedLinear:
        return cast("PackedLinear", self._modules[f"{part}_l{layer}"])

    def _matrices(self) -> list[PackedLinear]:
        return [cast("PackedLinear", self._modules[name]) for name in matrix_names(self.num_layers)]

    def _fused(self, rows: Tensor, state: tuple[Tensor, ...]) -> PreparedLSTM | Refusal:
        """The layers prepared for one native call, or what stands against it."""
        if torch.is_grad_enabled() and (rows.requires_grad or any(s.requires_grad for s in state)):
            return GRADIENTS
        refusal = input_refusal(rows)
        if refusal is None and any(s.dtype is not torch.float32 for s in state):
            refusal = STATE_TYPE
        if refusal is not None:
            return refusal
        matrices = self._matrices()
        if any(m._forward_hooks or m._forward_pre_hooks for m in matrices):
            return LAYER_HOOKS
        parts = [matrix.prepared() for matrix in matrices]
        known, stack = self._stack
        if parts != known:
            refusal = next((part for part in parts if isinstance(part, Refusal)), None)
            stack = refusal or PreparedLSTM(cast("list[PreparedLinear]", parts))
            self._stack = (parts, stack)
        return stack

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles prepare their own.
        return {**self.__dict__, "_stack": NO_STACK}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A checkpoint of the unpacked LSTM has `weight_ih_l0`: hand it to the matrix `ih_l0`, which packs it.
        for key in list(state_dict):
            what, _, rest = key.removeprefix(prefix).partition("_")
            name, *below = rest.split(".")
            if key.startswith(prefix) and what in {"weight", "bias", "gate"} and name in self._modules:
                state_dict[".".join([prefix + name, what, *below])] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)
