"""LSTMs and GRUs that hold nothing but packed blocks, gated or dense: what `pack` makes of them, for inference."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from blockgate.runtime.cells import LSTMState, State
from blockgate.runtime.exporting import NO_FORM, refuse_onnx_export
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
from blockgate.runtime.prepared import Prepared, PreparedLinear, PreparedStack, prepared_stack
from blockgate.runtime.recurrent import (
    GRUInterface,
    LSTMInterface,
    RecurrentInterface,
    Segments,
    matrix_names,
    run_layer,
    run_layers,
    step_by_step,
    suffixes_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

__all__ = ["PackedGRU", "PackedLSTM", "PackedRecurrence"]

# The prepared matrices of a layer, and the stack that was made of them: written as one, so that threads see a pair.
Stack: TypeAlias = "tuple[list[PreparedLinear | Refusal], Prepared | Refusal]"
NO_STACK: Stack = ([], LAYER_HOOKS)


class PackedRecurrence(RecurrentInterface):
    """A recurrent layer of torch or of ours on packed blocks, for inference; made by `pack`.

    Its matrices `ih_l0`, `hh_l0`, ... are packed linear layers. Checkpoints of the unpacked layer load too.

    Args:
        matrices: by name, `ih_l0` (gates * H, input_size), `hh_l0` (gates * H, H), ... in torch's order.
        batch_first: whether input and output are (batch, time, features).
        bidirectional: whether there are two directions; the matrices of the second end in `_reverse`.
    """

    def __init__(self, matrices: Mapping[str, PackedLinear], batch_first: bool, bidirectional: bool = False) -> None:
        first, recurrent, *_ = matrices.values()
        layers = len(matrices) // (4 if bidirectional else 2)
        super().__init__(first.in_features, recurrent.in_features, layers, batch_first, bidirectional)
        for name, matrix in matrices.items():
            self.add_module(name, matrix)
        self._stack = NO_STACK
        self.train(False)

    def train(self, mode: bool = True) -> Self:  # noqa: ARG002
        """Packed layers are for inference: they stay in eval mode, whatever the model around them does."""
        return super().train(False)

    def extra_repr(self) -> str:
        """The sizes, for print(model)."""
        both = ", bidirectional=True" if self.bidirectional else ""
        sizes = f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}"
        return f"{sizes}, batch_first={self.batch_first}{both}"

    def _call(self, x: Tensor | PackedSequence, hx: Any) -> tuple[Any, Any]:
        if type(x) is Tensor and x.dim() == 3 and not self.batch_first:
            # One token at a time, every call counts: the fused op takes this layout as it is.
            self._check_sequence(x)
            state = self._initial(hx, x.shape[1], x)
            fused = self._fused(x, state)
            if type(fused) is PreparedStack:
                y, state = fused(x, state)
                return y, self.cell.give(state)
        return super()._call(x, hx)

    def plan(self, x: Tensor | PackedSequence, hx: LSTMState | Tensor | None = None) -> Plan:
        """Which path `forward` takes for this input now, and why."""
        rows = x.data if isinstance(x, PackedSequence) else x
        fused = self._fused(rows, (hx,) if isinstance(hx, Tensor) else hx or ())
        if not isinstance(fused, Refusal):
            return Plan(FUSED, figures=fused.figures())
        plan = slower_path(fused, rows, self._matrices()[0].backend, [m.gpu_refusal() for m in self._matrices()])
        return plan._replace(path=STEPS) if plan.path == OPS else plan

    def repack(self) -> None:
        """Forgets what is prepared for native calls; needed after writing parameters by hand."""
        self._stack = NO_STACK
        for matrix in self._matrices():
            matrix.repack()

    def _run(self, rows: Tensor, segments: Segments, state: State) -> tuple[Tensor, State]:
        fused = self._fused(rows, state)
        if not isinstance(fused, Refusal):
            return fused.run(rows, segments, state)
        refuse_onnx_export("a packed recurrent layer", NO_FORM)
        layers = [
            partial(
                run_layer,
                segments=segments,
                product=self._matrix("ih", suffix),
                recurrence=partial(step_by_step, product=self._matrix("hh", suffix), cell=self.cell),
                backwards=suffix.endswith("_reverse"),
            )
            for suffix in suffixes_of(self.num_layers, self.bidirectional)
        ]
        return run_layers(rows, state, layers, self._directions)

    def _matrix(self, part: str, suffix: str) -> PackedLinear:
        return cast("PackedLinear", self._modules[part + suffix])

    def _matrices(self) -> list[PackedLinear]:
        return [cast("PackedLinear", self._modules[name]) for name in matrix_names(self)]

    def _fused(self, rows: Tensor, state: State) -> Prepared | Refusal:
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
            prepared = cast("list[PreparedLinear]", parts)
            stack = refusal or prepared_stack(self.cell, prepared, self.bidirectional)
            self._stack = (parts, stack)
        return stack

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles prepare their own.
        return {**self.__dict__, "_stack": NO_STACK}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.repack()
        # A checkpoint of the unpacked layer has `weight_ih_l0`: hand it to the matrix `ih_l0`, which packs it.
        for key in list(state_dict):
            what, _, rest = key.removeprefix(prefix).partition("_")
            name, *below = rest.split(".")
            if key.startswith(prefix) and what in {"weight", "bias", "gate"} and name in self._modules:
                state_dict[".".join([prefix + name, what, *below])] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


class PackedLSTM(PackedRecurrence, LSTMInterface):
    """nn.LSTM or DynamicSparseLSTM on packed blocks, for inference; made by `pack`."""


class PackedGRU(PackedRecurrence, GRUInterface):
    """nn.GRU or DynamicSparseGRU on packed blocks, for inference; made by `pack`."""
