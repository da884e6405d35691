"""LSTM, GRU and QRNN layers, one token at a time and in training, against the fastest dense ones that torch has."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from blockgate.convert import pack
from blockgate.inspect.timing import carry_on, in_turn
from blockgate.lab.bench.checks import SHORT_NAMES, by_reference, open_gates, packed_dense_name, require_close
from blockgate.lab.bench.comparison import Arm, Comparison
from blockgate.lab.bench.engines import torch_int8, without_onednn
from blockgate.layers import QRNN, DynamicSparseGRU, DynamicSparseLSTM, DynamicSparseQRNN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "Floors",
    "RecurrentCase",
    "cell_decode",
    "cell_training",
    "qrnn_decode",
    "qrnn_training",
]

# Different inputs that an arm meets in turn.
INPUTS = 16

# The least speed-up for each sparsity; None where nothing is promised.
Floors = dict[float, float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentCase:
    """Sizes of a recurrent network and of what runs through it.

    `cell` is that of `cell_decode` and `cell_training`; with `both`, every layer runs from the end too.
    """

    cell: Literal["LSTM", "GRU"] = "LSTM"
    both: bool = False
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

    def dense(self) -> nn.LSTM | nn.GRU:
        """Torch's network of this cell."""
        kind = nn.LSTM if self.cell == "LSTM" else nn.GRU
        return kind(self.hidden, self.hidden, self.layers, bidirectional=self.both)

    def gated(self, dense: nn.Module, sparsity: float) -> nn.Module:
        """The gated network around a dense one."""
        form: Any = DynamicSparseLSTM if self.cell == "LSTM" else DynamicSparseGRU
        made: nn.Module = form.from_dense(dense, sparsity=sparsity, **self.gate_options)
        return made

    def inputs(self) -> list[Tensor]:
        """Random sequences (T, N, H)."""
        torch.manual_seed(0)
        return [torch.randn(self.steps, self.batch, self.hidden) for _ in range(INPUTS)]


def cell_decode(case: RecurrentCase, floors: dict[torch.dtype, Floors]) -> Comparison:
    """One step after the other with carried state: what generating text costs without its decoder.

    With several steps, what reading costs; in both directions, each call is a sequence of its own.
    """
    dense = case.dense().eval()
    arms = [Arm(name=name, call=call, rival=True) for name, call in _dense_decoders(dense, case).items()]
    arms += _packed_dense_arms(dense, case, floors)
    for sparsity in sorted({s for by_sparsity in floors.values() for s in by_sparsity}):
        arms += _decode_arms(open_gates(case.gated(dense, sparsity)), sparsity, case, floors)
    how = "both ways" if case.both else "one token at a time" if case.steps == 1 else "sequences"
    return Comparison(work=f"{case.cell}, {how}, {case.sizes}", arms=arms)


def qrnn_decode(case: RecurrentCase, floors: dict[torch.dtype, Floors]) -> Comparison:
    """The same for a QRNN with windows 2, 1, 1, ..."""
    dense = QRNN(case.hidden, case.hidden, case.layers, window=_windows(case)).eval()
    arms = [Arm(name="dense QRNN", call=_decoder(dense, case), rival=True)]
    arms += _packed_dense_arms(dense, case, floors)
    for sparsity in sorted({s for by_sparsity in floors.values() for s in by_sparsity}):
        gated = DynamicSparseQRNN.from_dense(dense, sparsity=sparsity, **case.gate_options)
        arms += _decode_arms(open_gates(gated), sparsity, case, floors)
    return Comparison(work=f"QRNN, one token at a time, {case.sizes}", arms=arms)


def cell_training(case: RecurrentCase, floors: Floors) -> Comparison:
    """Forward and backward through time, with gradients of the input and all parameters."""
    dense = case.dense()
    arms = [
        Arm(name=f"nn.{case.cell}", call=_training_step(dense, case), rival=True),
        Arm(name=f"nn.{case.cell} without oneDNN", call=_slow_path(_training_step(dense, case)), rival=True),
        Arm(name=f"nn.{case.cell}Cell loop", call=_training_step(_CellLoop(dense), case), rival=True),
    ]
    for sparsity, floor in floors.items():
        gated = open_gates(case.gated(copy.deepcopy(dense), sparsity))
        arms.append(_training_arm(gated, sparsity, floor, case))
    return Comparison(work=f"{case.cell}, training step, {case.sizes}", arms=arms, training=True)


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


def _dense_decoders(dense: nn.LSTM | nn.GRU, case: RecurrentCase) -> dict[str, Callable[[], Any]]:
    found = {
        f"nn.{case.cell}": _decoder(dense, case),
        f"nn.{case.cell} without oneDNN": _slow_path(_decoder(dense, case)),
    }
    if not case.both:
        found[f"nn.{case.cell}Cell loop"] = _decoder(_CellLoop(dense).eval(), case)
    if case.cell == "GRU":
        # For LSTMs, the comparisons of whole language models have it.
        found["torch int8 dynamic"] = _decoder(next(torch_int8(nn.ModuleList([dense])).children()), case)
    return found


@torch.no_grad()
def _packed_dense_arms(dense: nn.Module, case: RecurrentCase, dtypes: Iterable[torch.dtype]) -> list[Arm]:
    """The dense network packed by blockgate: what of the gain has nothing to do with gates."""
    x, arms = case.inputs()[0][:3], []
    for dtype in dtypes:
        packed, name = pack(dense, dtype), packed_dense_name(dtype)
        require_close(packed(x)[0], dense(x)[0], name)
        arms.append(Arm(name=name, call=_decoder(packed, case)))
    return arms


def _decode_arms(
    gated: nn.Module, sparsity: float, case: RecurrentCase, floors: dict[torch.dtype, Floors]
) -> list[Arm]:
    """Ours in every packed type, each checked against the reference before it may be timed."""
    gated.eval()
    x = case.inputs()[0][:3]
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
    return in_turn(case.inputs(), model if case.both else carry_on(model))


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
    """An nn.LSTM or nn.GRU as a Python loop over its cell: for one token the fastest that torch offers."""

    def __init__(self, lstm: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        kind = nn.LSTMCell if isinstance(lstm, nn.LSTM) else nn.GRUCell
        self.cells = nn.ModuleList(kind(lstm.input_size, lstm.hidden_size) for _ in range(lstm.num_layers))
        for layer, cell in enumerate(self.cells):
            for name, _ in list(cell.named_parameters()):
                setattr(cell, name, getattr(lstm, f"{name}_l{layer}"))

    def forward(self, x: Tensor, state: list[Any] | None = None) -> tuple[Tensor, Any]:
        states: list[Any] = list(state) if state else [None] * len(self.cells)
        outputs = []
        for step in x:
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(step, states[layer])
                step = states[layer][0] if isinstance(states[layer], tuple) else states[layer]
            outputs.append(step)
        return torch.stack(outputs), states
