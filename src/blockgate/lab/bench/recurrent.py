"""LSTM and QRNN layers, one token at a time and in training, against the fastest dense ones that torch has."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockgate.convert import pack
from blockgate.lab.bench.checks import SHORT_NAMES, by_reference, open_gates, require_close
from blockgate.lab.bench.comparison import Arm, Comparison
from blockgate.lab.bench.engines import without_onednn
from blockgate.lab.bench.timing import carry_on, in_turn
from blockgate.layers import QRNN, DynamicSparseLSTM, DynamicSparseQRNN

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Floors",
    "RecurrentCase",
    "lstm_decode",
    "lstm_training",
    "qrnn_decode",
    "qrnn_training",
]

# Different inputs that an arm meets in turn.
INPUTS = 16

# The least speed-up for each sparsity; None where nothing is promised.
Floors = dict[float, float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentCase:
    """Sizes of a recurrent network and of what runs through it."""

    hidden: int = 1536
    layers: int = 2
    block: int = 128
    key: int = 128
    batch: int = 1
    steps: int = 1

    @property
    def gate_options(self) -> dict[str, Any]:
        """For gated layers: blocks are chosen among all, so that every sparsity is met to the block."""
        return {"block_size": self.block, "key_size": self.key, "gate": "eq1"}

    @property
    def sizes(self) -> str:
        """For titles."""
        return (
            f"{self.layers} x {self.hidden}, block {self.block}, key {self.key}, batch {self.batch}, "
            f"{self.steps} step{'s' if self.steps > 1 else ''}"
        )

    def inputs(self) -> list[Tensor]:
        """Random sequences (T, N, H)."""
        torch.manual_seed(0)
        return [torch.randn(self.steps, self.batch, self.hidden) for _ in range(INPUTS)]


def lstm_decode(case: RecurrentCase, floors: dict[torch.dtype, Floors]) -> Comparison:
    """One step after the other with carried state: what generating text costs without its decoder."""
    dense = nn.LSTM(case.hidden, case.hidden, case.layers).eval()
    arms = [Arm(name=name, call=call, rival=True) for name, call in _dense_decoders(dense, case).items()]
    for sparsity in sorted({s for by_sparsity in floors.values() for s in by_sparsity}):
        gated = DynamicSparseLSTM.from_dense(dense, sparsity=sparsity, **case.gate_options)
        arms += _decode_arms(open_gates(gated), sparsity, case, floors)
    return Comparison(work=f"LSTM, one token at a time, {case.sizes}", arms=arms)


def qrnn_decode(case: RecurrentCase, floors: dict[torch.dtype, Floors]) -> Comparison:
    """The same for a QRNN with windows 2, 1, 1, ..."""
    dense = QRNN(case.hidden, case.hidden, case.layers, window=_windows(case)).eval()
    arms = [Arm(name="dense QRNN", call=_decoder(dense, case), rival=True)]
    for sparsity in sorted({s for by_sparsity in floors.values() for s in by_sparsity}):
        gated = DynamicSparseQRNN.from_dense(dense, sparsity=sparsity, **case.gate_options)
        arms += _decode_arms(open_gates(gated), sparsity, case, floors)
    return Comparison(work=f"QRNN, one token at a time, {case.sizes}", arms=arms)


def lstm_training(case: RecurrentCase, floors: Floors) -> Comparison:
    """Forward and backward through time, with gradients of the input and all parameters."""
    dense = nn.LSTM(case.hidden, case.hidden, case.layers)
    arms = [
        Arm(name="nn.LSTM", call=_training_step(dense, case), rival=True),
        Arm(name="nn.LSTM without oneDNN", call=_slow_path(_training_step(dense, case)), rival=True),
        Arm(name="nn.LSTMCell loop", call=_training_step(_CellLoop(dense), case), rival=True),
    ]
    for sparsity, floor in floors.items():
        gated = open_gates(DynamicSparseLSTM.from_dense(copy.deepcopy(dense), sparsity=sparsity, **case.gate_options))
        arms.append(_training_arm(gated, sparsity, floor, case))
    return Comparison(work=f"LSTM, training step, {case.sizes}", arms=arms, training=True)


def qrnn_training(case: RecurrentCase, floors: Floors) -> Comparison:
    """The same for a QRNN with windows 2, 1, 1, ..."""
    dense = QRNN(case.hidden, case.hidden, case.layers, window=_windows(case))
    arms = [Arm(name="dense QRNN", call=_training_step(dense, case), rival=True)]
    for sparsity, floor in floors.items():
        gated = open_gates(DynamicSparseQRNN.from_dense(copy.deepcopy(dense), sparsity=sparsity, **case.gate_options))
        arms.append(_training_arm(gated, sparsity, floor, case))
    return Comparison(work=f"QRNN, training step, {case.sizes}", arms=arms, training=True)


def _windows(case: RecurrentCase) -> tuple[int, ...]:
    return (2, *[1] * (case.layers - 1))


def _dense_decoders(dense: nn.LSTM, case: RecurrentCase) -> dict[str, Callable[[], Any]]:
    return {
        "nn.LSTM": _decoder(dense, case),
        "nn.LSTM without oneDNN": _slow_path(_decoder(dense, case)),
        "nn.LSTMCell loop": _decoder(_CellLoop(dense).eval(), case),
    }


def _decode_arms(
    gated: nn.Module, sparsity: float, case: RecurrentCase, floors: dict[torch.dtype, Floors]
) -> list[Arm]:
    """Ours in every packed type, each checked against the reference before it may be timed."""
    gated.eval()
    x = case.inputs()[0]
    arms = []
    with torch.no_grad():
        for dtype, by_sparsity in floors.items():
            packed = pack(gated, dtype)
            name = f"blockgate {SHORT_NAMES[dtype]} {sparsity:.0%}"
            require_close(packed(x)[0], by_reference(gated, packed)(x)[0], name)
            call = _decoder(packed, case)
            arms.append(Arm(name=name, call=call, floor=by_sparsity.get(sparsity)))
    return arms


def _training_arm(gated: nn.Module, sparsity: float, floor: float | None, case: RecurrentCase) -> Arm:
    name = f"blockgate {sparsity:.0%}"
    x = case.inputs()[0][:3, :2]
    with torch.no_grad():
        want = by_reference(gated)(x)[0]
    require_close(gated(x)[0].detach(), want, name)
    return Arm(name=name, call=_training_step(gated, case), floor=floor)


def _decoder(model: nn.Module, case: RecurrentCase) -> Callable[[], Any]:
    """A call that feeds the next input and carries the state on: the gates open other blocks every time."""
    return in_turn(case.inputs(), carry_on(model))


def _training_step(model: nn.Module, case: RecurrentCase) -> Callable[[], None]:
    model.train()
    x = case.inputs()[0].requires_grad_()
    grad = torch.randn(case.steps, case.batch, case.hidden)

    def step() -> None:
        for leaf in (x, *model.parameters()):
            leaf.grad = None
        model(x)[0].backward(grad)

    return step


def _slow_path(call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        with without_onednn():
            call()

    return run


class _CellLoop(nn.Module):
    """An nn.LSTM as a Python loop over nn.LSTMCell: for one token the fastest that torch offers."""

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(lstm.input_size, lstm.hidden_size) for _ in range(lstm.num_layers))
        for layer, cell in enumerate(self.cells):
            for name, _ in list(cell.named_parameters()):
                setattr(cell, name, getattr(lstm, f"{name}_l{layer}"))

    def forward(self, x: Tensor, state: list[tuple[Tensor, Tensor]] | None = None) -> tuple[Tensor, Any]:
        states: list[Any] = list(state) if state else [None] * len(self.cells)
        outputs = []
        for step in x:
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(step, states[layer])
                step = states[layer][0]
            outputs.append(step)
        return torch.stack(outputs), states
