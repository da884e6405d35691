"""LSTM and QRNN layers, one token at a time and in training, against the fastest dense ones that torch has."""

from __future__ import annotations

import copy
import itertools
import re
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockgate.convert import pack
from blockgate.errors import BlockgateError
from blockgate.gates import Gate
from blockgate.lab.bench.comparison import Comparison, Contender
from blockgate.layers import QRNN, DynamicSparseLSTM, DynamicSparseQRNN
from blockgate.runtime.packed import PackedBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "Floors",
    "RecurrentCase",
    "by_reference",
    "lstm_decode",
    "lstm_training",
    "open_gates",
    "qrnn_decode",
    "qrnn_training",
    "require_close",
    "without_onednn",
]

SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "int8"}
# Largest relative error against the reference that may still be timed. A rounding difference now and then turns the
# choice between two blocks of nearly equal score, which changes an output by a few percent; a wrong kernel changes all.
MOST_ERROR = 0.1
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


def open_gates(model: nn.Module) -> nn.Module:
    """Fresh gates whose scores are all positive, so that exactly the asked blocks open."""
    for module in model.modules():
        if isinstance(module, Gate):
            module.reset_parameters()
            nn.init.constant_(module.bias, 5.0)
    return model


def require_close(got: Tensor, want: Tensor, what: str) -> None:
    """Raises unless a result is right: nothing wrong is ever timed."""
    error = ((got - want).norm() / want.norm()).item()
    if not error < MOST_ERROR:
        raise BlockgateError(
            f"bench: expected {what} to be right before timing it, got a relative error of {error:.2g}. No speed is "
            "reported."
        )


@torch.no_grad()
def by_reference(model: nn.Module, packed: nn.Module | None = None) -> nn.Module:
    """A copy of a gated model that computes with the reference alone; with the rounded weights of `packed` if given."""
    judge = copy.deepcopy(model)
    for module in judge.modules():
        if isinstance(module, Gate):
            module.spec = replace(module.spec, backend="reference")
    for name, blocks in [] if packed is None else packed.named_modules():
        if isinstance(blocks, PackedBlocks):
            # "lstm.ih_l0.packed" holds "lstm.weight_ih_l0", "decoder.packed" holds "decoder.weight".
            layer = name.removesuffix("packed")
            weight = re.sub(r"([ih]h_l\d+)\.$", r"weight_\1", layer)
            judge.get_parameter(weight if weight != layer else f"{layer}weight").copy_(blocks.weight())
    return judge


def lstm_decode(case: RecurrentCase, floors: dict[torch.dtype, Floors]) -> Comparison:
    """One step after the other with carried state: what generating text costs without its decoder."""
    dense = nn.LSTM(case.hidden, case.hidden, case.layers).eval()
    contenders = [Contender(name=name, call=call, rival=True) for name, call in _dense_decoders(dense, case).items()]
    for sparsity in sorted({s for by_sparsity in floors.values() for s in by_sparsity}):
        gated = DynamicSparseLSTM.from_dense(dense, sparsity=sparsity, **case.gate_options)
        contenders += _decode_contenders(open_gates(gated), sparsity, case, floors)
    return Comparison(work=f"LSTM, one token at a time, {case.sizes}", contenders=contenders)


def qrnn_decode(case: RecurrentCase, floors: dict[torch.dtype, Floors]) -> Comparison:
    """The same for a QRNN with windows 2, 1, 1, ..."""
    dense = QRNN(case.hidden, case.hidden, case.layers, window=_windows(case)).eval()
    contenders = [Contender(name="dense QRNN", call=_decoder(dense, case), rival=True)]
    for sparsity in sorted({s for by_sparsity in floors.values() for s in by_sparsity}):
        gated = DynamicSparseQRNN.from_dense(dense, sparsity=sparsity, **case.gate_options)
        contenders += _decode_contenders(open_gates(gated), sparsity, case, floors)
    return Comparison(work=f"QRNN, one token at a time, {case.sizes}", contenders=contenders)


def lstm_training(case: RecurrentCase, floors: Floors) -> Comparison:
    """Forward and backward through time, with gradients of the input and all parameters."""
    dense = nn.LSTM(case.hidden, case.hidden, case.layers)
    contenders = [
        Contender(name="nn.LSTM", call=_training_step(dense, case), rival=True),
        Contender(name="nn.LSTM without oneDNN", call=_slow_path(_training_step(dense, case)), rival=True),
        Contender(name="nn.LSTMCell loop", call=_training_step(_CellLoop(dense), case), rival=True),
    ]
    for sparsity, floor in floors.items():
        gated = open_gates(DynamicSparseLSTM.from_dense(copy.deepcopy(dense), sparsity=sparsity, **case.gate_options))
        contenders.append(_training_contender(gated, sparsity, floor, case))
    return Comparison(work=f"LSTM, training step, {case.sizes}", contenders=contenders)


def qrnn_training(case: RecurrentCase, floors: Floors) -> Comparison:
    """The same for a QRNN with windows 2, 1, 1, ..."""
    dense = QRNN(case.hidden, case.hidden, case.layers, window=_windows(case))
    contenders = [Contender(name="dense QRNN", call=_training_step(dense, case), rival=True)]
    for sparsity, floor in floors.items():
        gated = open_gates(DynamicSparseQRNN.from_dense(copy.deepcopy(dense), sparsity=sparsity, **case.gate_options))
        contenders.append(_training_contender(gated, sparsity, floor, case))
    return Comparison(work=f"QRNN, training step, {case.sizes}", contenders=contenders)


def _windows(case: RecurrentCase) -> tuple[int, ...]:
    return (2, *[1] * (case.layers - 1))


def _dense_decoders(dense: nn.LSTM, case: RecurrentCase) -> dict[str, Callable[[], Any]]:
    return {
        "nn.LSTM": _decoder(dense, case),
        "nn.LSTM without oneDNN": _slow_path(_decoder(dense, case)),
        "nn.LSTMCell loop": _decoder(_CellLoop(dense).eval(), case),
    }


def _decode_contenders(
    gated: nn.Module, sparsity: float, case: RecurrentCase, floors: dict[torch.dtype, Floors]
) -> list[Contender]:
    """Ours in every packed type, each checked against the reference before it may be timed."""
    gated.eval()
    x = case.inputs()[0]
    contenders = []
    with torch.no_grad():
        for dtype, by_sparsity in floors.items():
            packed = pack(gated, dtype)
            name = f"blockgate {SHORT[dtype]} {sparsity:.0%}"
            require_close(packed(x)[0], by_reference(gated, packed)(x)[0], name)
            call = _decoder(packed, case)
            contenders.append(Contender(name=name, call=call, floor=by_sparsity.get(sparsity)))
    return contenders


def _training_contender(gated: nn.Module, sparsity: float, floor: float | None, case: RecurrentCase) -> Contender:
    name = f"blockgate {sparsity:.0%}"
    x = case.inputs()[0][:3, :2]
    with torch.no_grad():
        want = by_reference(gated)(x)[0]
    require_close(gated(x)[0].detach(), want, name)
    return Contender(name=name, call=_training_step(gated, case), floor=floor)


def _decoder(model: nn.Module, case: RecurrentCase) -> Callable[[], Any]:
    """A call that feeds the next input and carries the state on: the gates open other blocks every time."""
    turn = itertools.cycle(case.inputs())
    state: list[Any] = [None]

    @torch.no_grad()
    def step() -> None:
        _, state[0] = model(next(turn), state[0])

    return step


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


@contextmanager
def without_onednn() -> Iterator[None]:
    """Switches oneDNN off: torch's own flags() warns about settings that it doesn't change."""
    before = torch.backends.mkldnn.set_flags(False)[0]
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before)


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
