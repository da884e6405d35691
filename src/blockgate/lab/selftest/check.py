"""One problem: the library called in every way that it can be, and each result held against the formula."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from blockgate.convert import pack
from blockgate.convert.forms import packers
from blockgate.formats import get_format
from blockgate.lab.selftest.bad_values import check_bad
from blockgate.lab.selftest.formula import WrongChoiceError
from blockgate.lab.selftest.formula_side import FormulaSide
from blockgate.lab.selftest.judge import DifferenceError, Findings, gradient_of
from blockgate.lab.selftest.library import Built, build, call, call_with_gradients
from blockgate.lab.selftest.screened import check_screened

if TYPE_CHECKING:
    from torch import Tensor

    from blockgate.lab.selftest.numbers import Number
    from blockgate.lab.selftest.problems import Problem

__all__ = ["check"]

# How many single rows and how many ranges of rows of a batch are called apart.
RANGES = 24
# How far a running mean moves in a training pass.
MOMENTUM = 0.02


def check(problem: Problem) -> Findings:
    """All comparisons of a problem; raises `DifferenceError` at the first one that fails."""
    findings = Findings(problems=1)
    if problem.layer == "screened":
        check_screened(problem, findings)
        return findings
    if problem.is_bad:
        check_bad(problem, findings)
        return findings
    built = build(problem)
    # The norms of weights are made from them, and never moved.
    before = {name: b.clone() for name, b in built.layer.named_buffers() if not name.endswith("norms")}
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        try:
            called = call_with_gradients(problem, built)
            side = FormulaSide(problem, built, findings, before)
            outputs = side.run()
            _compare_outputs(problem, findings, "", called.outputs, outputs, autocast=bool(problem.autocast))
            findings.trust(outputs["y"].value)
            ends = [
                (outputs[name], sent.double().numpy().reshape(outputs[name].value.shape))
                for name, sent in called.sent.items()
                if name in outputs and sent.numel()
            ]
            side.tape.backward(ends)
            for name, grad in called.grads.items():
                if name in side.leaves:
                    findings.compare(problem, f"gradient of {name}", grad, gradient_of(side.leaves[name]))
            if problem.training:
                _check_means(problem, built, findings, before)
                built.layer.eval()
                side = FormulaSide(problem, built, findings, {})
                outputs = side.run() if not problem.autocast else {}
            _check_inference(problem, built, findings, side, outputs)
        except WrongChoiceError as wrong:
            raise DifferenceError(str(wrong)) from None
    return findings


def _compare_outputs(
    problem: Problem,
    findings: Findings,
    how: str,
    actual: dict[str, Tensor],
    expected: dict[str, Number],
    precision: str = "",
    *,
    autocast: bool = False,
) -> None:
    for name, tensor in actual.items():
        if name in expected and (tensor.numel() or name == "y"):
            narrow = autocast and tensor.dtype is getattr(torch, problem.autocast)
            which = precision or (problem.autocast if narrow else "")
            findings.compare(problem, f"{how}{name}", tensor, expected[name].pair, which)


def _check_inference(
    problem: Problem, built: Built, findings: Findings, side: FormulaSide, expected: dict[str, Number]
) -> None:
    """The paths without gradients: one native call where there is one, and packed layers; whole and in parts."""
    if problem.autocast:
        return
    if problem.layer in {"linear", "conv1d", "mlp"}:
        with torch.no_grad():
            shown = built.layer.gates(built.x)  # type: ignore[operator]
        findings.compare(problem, "gates", shown, side.gates["gate"].pair)
    _check_calls(problem, built, findings, "inference", built.layer, expected)
    for name in problem.formats:
        if problem.layer == "qrnn":
            packed = pack(built.layer, name)
        else:
            packed = packers()[type(built.layer)](built.layer, get_format(name)).eval()
        copy = FormulaSide(problem, built, findings, {}, packed)
        if problem.layer in {"linear", "conv1d", "mlp"} and (problem.kind != "norm" or hasattr(packed, "columns")):
            # The same gate, which stays in float32.
            copy.gates = side.gates
        _check_calls(problem, built, findings, f"packed {name}", packed, copy.run())
        copy.check_stored()


def _check_calls(
    problem: Problem, built: Built, findings: Findings, how: str, layer: Any, expected: dict[str, Number]
) -> None:
    """A layer called with the whole batch, and with parts of it: they take other ways through the kernels."""
    precision = how if how.startswith("packed") else ""
    whole = call(problem, built, layer)
    _compare_outputs(problem, findings, f"{how}: ", whole, expected, precision)
    if problem.rows < 2 or problem.ragged or problem.backend == "reference":
        # Torch's products, and so the reference's choices, may differ with the number of rows.
        return
    # Small calls, cheap ones, are where the ways through the kernels differ most.
    flat = problem.layer in {"linear", "conv1d", "mlp"}
    ends = built.random.integers(0, problem.rows, (RANGES if flat else 6, 2))
    parts = [(i, i + 1) for i in range(min(problem.rows, RANGES if flat else 6))]
    parts += [(min(a, b), max(a, b) + 1) for a, b in ends.tolist()]
    for begin, end in parts:
        found = call(problem, built, layer, (begin, end))
        for name, tensor in found.items():
            if not tensor.numel():
                continue
            # Outputs are (steps or layers, rows, features), states of a Quasi-RNN and of a cell (rows, features).
            lead = 1 if flat or problem.is_cell or name[2:].isdigit() else -1
            value, bound = (a.reshape(lead, problem.rows, a.shape[-1])[:, begin:end] for a in expected[name].pair)
            findings.compare(problem, f"{how}, rows {begin} to {end}: {name}", tensor, (value, bound), precision)


def _check_means(problem: Problem, built: Built, findings: Findings, before: dict[str, Tensor]) -> None:
    """The running mean of a key after one training pass."""
    if problem.layer not in {"linear", "conv1d", "mlp"} or problem.kind != "margin":
        return
    gate: Any = built.layer.gate
    eps = torch.finfo(gate.key_mean.dtype).eps
    x = built.x.to(gate.key_mean.dtype).double().numpy()[:, gate.key_offset : gate.key_offset + gate.key_size]
    old = before["gate.key_mean"].double().numpy()
    size, mean = np.abs(x).mean(0) if len(x) else 0 * old, x.mean(0) if len(x) else old
    value = old + MOMENTUM * (mean - old)
    findings.compare(problem, "running mean", gate.key_mean, (value, eps * (2 * np.abs(old) + 4 * size)))
