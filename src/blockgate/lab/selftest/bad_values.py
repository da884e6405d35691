"""NaN and infinity: they reach what depends on them, and nothing else changes by a bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from blockgate.convert import pack
from blockgate.lab.selftest.judge import DifferenceError, Findings
from blockgate.lab.selftest.library import Built, Called, build, call, call_with_gradients

if TYPE_CHECKING:
    from torch import Tensor

    from blockgate.lab.selftest.problems import Problem

__all__ = ["check_bad"]


def check_bad(problem: Problem, findings: Findings) -> None:
    """Calls a layer before and after one of its values was made NaN or infinite."""
    built = build(problem)
    if problem.rows == 0:
        return
    paths: dict[str, Any] = {"inference": built.layer}
    whole = problem.values in {"bad_input", "bad_state"}
    for name in problem.formats:
        if whole or name in {"float32", "bfloat16", "float16"}:
            paths[f"packed {name}"] = pack(built.layer, name)
    clean = {name: call(problem, built, layer) for name, layer in paths.items()}
    with_gradients = call_with_gradients(problem, built)
    expected = _spoil(problem, built)
    for name, layer in paths.items():
        if not whole and name != "inference":
            layer = pack(built.layer, name.removeprefix("packed "))
        _judge(problem, findings, name, call(problem, built, layer), clean[name], expected)
    spoiled = call_with_gradients(problem, built, with_gradients.sent)
    _judge(problem, findings, "training", spoiled.outputs, with_gradients.outputs, expected)
    _judge_gradients(problem, findings, built, spoiled, with_gradients, expected)


def _spoil(problem: Problem, built: Built) -> dict[str, Tensor]:
    """Puts a bad value somewhere; which entries of every output must become NaN or infinite, and no others."""
    random, layer = built.random, built.layer
    value = random.choice([np.nan, np.inf, -np.inf])
    rows, out = len(built.x), problem.out
    reached = {"y": torch.zeros(rows, out * problem.directions, dtype=torch.bool)}
    recurrent = problem.is_recurrent
    if problem.layer == "qrnn":
        # What a window adds up goes through functions that make numbers of infinity.
        value = np.nan
    if problem.values == "bad_input" or (recurrent and problem.values in {"bad_weight", "bad_gate"}):
        row, step = _place(built, random)
        built.x[sum(built.alive[:step]) + row, int(random.integers(problem.inputs))] = value
        return _from_step(problem, built, row, step) if recurrent else reached | {"y": _row(reached["y"], row)}
    if problem.values == "bad_state":
        if built.state is None:
            raise AssertionError("a problem with a bad state has one")
        row = int(random.integers(problem.rows))
        built.state[0][0, row, int(random.integers(out))] = value
        return _from_step(problem, built, row, 0)
    gates: Any = layer.gates(built.x).detach() != 0  # type: ignore[operator]
    grid: Any = layer.grid
    with torch.no_grad():
        if problem.values == "bad_weight":
            o, k = int(random.integers(out)), int(random.integers(problem.inputs))
            matrix: Any = layer.weight.t() if problem.layer == "conv1d" else layer.weight  # type: ignore[operator]
            matrix[o, k] = value
            reached["y"][:, o] = gates[:, o // grid.block[0], k // grid.block[1]]
            return reached
        layer.gate.weight[int(random.integers(len(layer.gate.weight))), 0] = np.nan  # type: ignore[union-attr, operator, arg-type]
    # Nothing can be said of gates but that they are no numbers, and that their blocks are.
    shown = layer.gates(built.x).detach()  # type: ignore[operator]
    bad = (~shown.isfinite()).any(-1)
    per_output = bad.repeat_interleave(min(grid.block[0], out), 1)[:, :out]
    if problem.kind != "softmax_sum" and not bool(bad.flatten(1).any(1).all()):
        raise DifferenceError("a gate whose network holds NaN gave numbers")
    return {"only": per_output, "y": per_output}


def _place(built: Built, random: np.random.Generator) -> tuple[int, int]:
    """A row and a step at which it is alive."""
    step = int(random.integers(len(built.alive)))
    return int(random.integers(built.alive[step])), step


def _row(reached: Tensor, row: int) -> Tensor:
    reached[row] = True
    return reached


def _from_step(problem: Problem, built: Built, row: int, step: int) -> dict[str, Tensor]:
    """From a step on, all outputs of one sequence; the layers of a stack hand it on within the same step."""
    out = problem.out
    y = torch.zeros(len(built.x), out * problem.directions, dtype=torch.bool)
    state = torch.zeros(problem.layers * problem.directions, problem.rows, out, dtype=torch.bool)
    state[:, row] = True
    # A state begins in one direction; a second layer reads both, at every step.
    begins = problem.values == "bad_state"
    if problem.bidirectional and begins:
        state[1, row] = False
    first = 0
    for t, alive in enumerate(built.alive):
        if row < alive:
            everywhere = problem.bidirectional and problem.layers > 1
            y[first + row, :out] = t >= step or everywhere
            y[first + row, out:] = everywhere or (t <= step and not begins)
        first += alive
    if problem.layer == "qrnn":
        return {"y": y} | {f"c_{i}": state[i] for i in range(problem.layers)}
    return {"y": y, "h_n": state, "c_n": state} if problem.is_stack else {"y": y, "c_n": state[0]}


def _judge_gradients(
    problem: Problem, findings: Findings, built: Built, spoiled: Called, clean: Called, reached: dict[str, Tensor]
) -> None:
    """Rows whose outputs stayed as they were keep the bits of their gradients."""
    touched = reached["y"].any(1)
    if "only" in reached or problem.backend == "reference":
        # Torch's products, and so the reference's gradients, may differ in their last bits.
        return
    if problem.is_recurrent:
        # Gradients go back to all steps of a sequence.
        rows = torch.zeros(problem.rows, dtype=torch.bool)
        ends = np.cumsum([0, *built.alive])
        for first, alive in zip(ends, built.alive, strict=False):
            rows[:alive] |= touched[first : first + alive]
        touched = torch.cat([rows[:alive] for alive in built.alive])
    findings.equal(problem, "gradient of x beside bad values", spoiled.grads["x"][~touched], clean.grads["x"][~touched])
    findings.comparisons += 1
    findings.elements += int((~touched).sum()) * problem.inputs
    findings.by_layer[problem.layer] = findings.by_layer.get(problem.layer, 0) + 1


def _judge(
    problem: Problem,
    findings: Findings,
    how: str,
    actual: dict[str, Tensor],
    clean: dict[str, Tensor],
    reached: dict[str, Tensor],
) -> None:
    for name, tensor in actual.items():
        if name not in reached:
            continue
        bad = reached[name].view_as(tensor)
        finite = tensor.isfinite()
        if bool((finite & bad).any()) or ("only" not in reached and bool((~finite & ~bad).any())):
            wrong = int((finite == bad).sum())
            raise DifferenceError(f"{how}, {problem.values}: {wrong} entries of {name} should (not) be finite")
        if "only" not in reached and problem.backend != "reference":
            findings.equal(problem, f"{how}: {name} beside bad values", tensor[~bad], clean[name][~bad])
        findings.comparisons += 1
        findings.elements += tensor.numel()
        findings.by_layer[problem.layer] = findings.by_layer.get(problem.layer, 0) + 1
