"""LSTMs, GRUs and Quasi-RNNs on a GPU against torch's own (cuDNN), and the layers of the speed targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockgate.inspect.timing import carry_on, in_turn
from blockgate.lab.bench.checks import by_reference, require_close
from blockgate.lab.bench.gpu import TYPES, GPUResult, medians_on, run_on
from blockgate.lab.bench.recurrent import INPUTS, RecurrentCase
from blockgate.lab.bench.targets import TARGETS
from blockgate.layers import QRNN, DynamicSparseGRU, DynamicSparseLSTM, DynamicSparseQRNN

if TYPE_CHECKING:
    from blockgate.lab.bench.linear import LinearCase

__all__ = ["GPU_WORK", "GPUPlan", "run_recurrent_on"]

SPARSITIES = (0.5, 0.75, 0.9)

Work = Callable[..., GPUResult]


@dataclass(frozen=True, kw_only=True, slots=True)
class GPUPlan:
    """What is timed: a network of one kind, generating step by step or training."""

    kind: str
    case: RecurrentCase
    training: bool = False
    cold: bool = False

    @property
    def title(self) -> str:
        """For tables, progress bars and choosing."""
        what = "training" if self.training else "decode"
        return f"{what}, {self.kind.upper()} {self.case.sizes}{', evicted cache' if self.cold else ''}"


def _plans(kind: str, layers: int, steps: int) -> tuple[GPUPlan, ...]:
    one, many = RecurrentCase(layers=layers), RecurrentCase(layers=layers, batch=20, steps=steps)
    return (
        GPUPlan(kind=kind, case=one),
        GPUPlan(kind=kind, case=one, cold=True),
        GPUPlan(kind=kind, case=replace(one, batch=16)),
        GPUPlan(kind=kind, case=many, training=True),
    )


def run_recurrent_on(plan: GPUPlan, device: str, *, seconds: float) -> GPUResult:
    """Builds all arms of a network on `device`, checks ours against the reference, and times them in turns.

    Ours have the default gate, whose number of open blocks is exact. An LSTM or GRU of torch on a GPU is cuDNN's.
    """
    calls: dict[str, Callable[[], Any]] = {}
    for short, dtype in TYPES.items():
        inputs = [x.to(device, dtype) for x in plan.case.inputs()]
        dense = _dense(plan).to(device, dtype)
        calls[f"dense {short}"] = _call(dense, inputs, plan.training)
        for sparsity in SPARSITIES:
            gated = _gated(plan, sparsity).to(device).eval()
            with torch.no_grad():
                x = inputs[0][:3, :2].float()
                require_close(gated(x)[0], by_reference(gated)(x)[0], f"{plan.kind} {sparsity:.0%}")
            calls[f"blockgate {short} {sparsity:.0%}"] = _call(gated.to(dtype), inputs, plan.training)
    return GPUResult(
        title=plan.title,
        case=asdict(plan.case) | {"sparsities": SPARSITIES, "cold": plan.cold},
        training=plan.training,
        device=torch.cuda.get_device_name() if device == "cuda" else device,
        seconds=medians_on(calls, device, seconds=seconds, cold=plan.cold),
    )


def _target_cases() -> dict[str, tuple[LinearCase, bool]]:
    """The layers of the speed targets by name, and whether they train: each once, since the types are arms on a GPU.

    Nothing is promised for a GPU, so there are no floors. One row is timed with an evicted cache too.
    """
    found: dict[str, tuple[LinearCase, bool]] = {}
    seen = set()
    for target in TARGETS:
        case = replace(target.case(), dtypes=(), gate="margin")
        if (case, target.training) in seen:
            continue
        seen.add((case, target.training))
        found[target.work] = case, target.training
        if case.batch == 1 and not target.training:
            found[f"{target.work}, evicted cache"] = replace(case, cold=True), False
    return found


def _dense(plan: GPUPlan) -> nn.Module:
    case = plan.case
    if plan.kind in {"lstm", "gru"}:
        return (nn.LSTM if plan.kind == "lstm" else nn.GRU)(case.hidden, case.hidden, case.layers)
    return QRNN(case.hidden, case.hidden, case.layers, window=(2, *[1] * (case.layers - 1)))


def _gated(plan: GPUPlan, sparsity: float) -> nn.Module:
    forms: dict[str, Any] = {"lstm": DynamicSparseLSTM, "gru": DynamicSparseGRU, "qrnn": DynamicSparseQRNN}
    options = {"block_size": plan.case.block, "key_size": plan.case.key}
    made: nn.Module = forms[plan.kind].from_dense(_dense(plan), sparsity=sparsity, **options)
    return made


def _call(model: nn.Module, inputs: list[Tensor], training: bool) -> Callable[[], Any]:
    """A training step, or the next step of a sequence with the state of the last."""
    if not training:
        return _without_gradients(in_turn(inputs, carry_on(model.eval())))
    model.train()
    turn = 0

    def step() -> None:
        nonlocal turn
        turn += 1
        model.zero_grad()
        model(inputs[turn % INPUTS].detach().requires_grad_())[0].sum().backward()

    return step


def _without_gradients(call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        with torch.no_grad():
            call()

    return run


def _recurrent_work(kind: str, layers: int, steps: int) -> dict[str, Work]:
    return {plan.title: partial(run_recurrent_on, plan) for plan in _plans(kind, layers, steps)}


# What `blockgate bench WHAT --device cuda` measures, by title; called with a device and the seconds for each arm.
GPU_WORK: dict[str, dict[str, Work]] = {
    "targets": {title: partial(run_on, case, training=training) for title, (case, training) in _target_cases().items()},
    "lstm": _recurrent_work("lstm", 2, 35),
    "gru": _recurrent_work("gru", 2, 35),
    "qrnn": _recurrent_work("qrnn", 4, 105),
}
