"""Screened output layers against the formula: the largest scores, their rows, and the ranks of targets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from blockgate.lab.selftest.judge import DifferenceError, Findings
from blockgate.lab.selftest.library import draw_values, threads
from blockgate.runtime.screened import ScreenedLinear

if TYPE_CHECKING:
    from blockgate.lab.selftest.numbers import Array
    from blockgate.lab.selftest.problems import Problem

__all__ = ["check_screened"]

# Of a sum in float64, whatever its order.
SUM_EPS = 2.0**-50


def check_screened(problem: Problem, findings: Findings) -> None:
    """The k largest for several k, and the rank of random targets, for every row."""
    random = np.random.default_rng([23, problem.seed])
    values = "normal" if problem.is_bad else problem.values
    dense = nn.Linear(problem.inputs, problem.out, problem.bias)
    with torch.no_grad():
        for tensor in dense.parameters():
            scale = 1 / np.sqrt(problem.inputs) if tensor.dim() > 1 else 0.3
            tensor.copy_(draw_values(random, tuple(tensor.shape), values, scale))
        if values == "twins":
            half = problem.out // 2
            dense.weight[half : 2 * half] = dense.weight[:half]
        x = draw_values(random, (problem.rows, problem.inputs), values, 1.0).float()
    spoiled = np.zeros(problem.rows, dtype=bool)
    if problem.is_bad and problem.rows:
        row = int(random.integers(problem.rows))
        x[row, int(random.integers(problem.inputs))] = random.choice([np.nan, np.inf, -np.inf])
        spoiled[row] = True
    layer = ScreenedLinear(dense.weight, dense.bias)
    score, bound = _scores(dense, x)
    with torch.no_grad(), threads(problem.threads):
        for k in sorted({1, min(3, problem.out), int(random.integers(1, problem.out + 1)), problem.out}):
            found = layer.topk(x, k)
            rows = found.indices.numpy()
            _check_choice(rows, spoiled, score, bound, found.values.double().numpy(), findings)
            expected = np.take_along_axis(score, rows, 1), np.take_along_axis(bound, rows, 1)
            good = ~spoiled
            findings.compare(problem, f"the {k} largest", found.values[torch.from_numpy(good)], _at(expected, good))
        for _ in range(3):
            targets = torch.from_numpy(random.integers(0, problem.out, problem.rows))
            _check_ranks(problem, findings, layer.rank(x, targets).numpy(), targets.numpy(), spoiled, (score, bound))


def _scores(dense: nn.Linear, x: torch.Tensor) -> tuple[Array, Array]:
    """Scores (N, V) and how far from them float64 sums may be."""
    weight, inputs = dense.weight.detach().double().numpy(), x.double().numpy()
    with np.errstate(invalid="ignore"):
        score = inputs @ weight.T
        size = np.abs(inputs) @ np.abs(weight).T
        if dense.bias is not None:
            score, size = (
                score + dense.bias.detach().double().numpy(),
                size + dense.bias.detach().double().abs().numpy(),
            )
    return score, SUM_EPS * size


def _at(pair: tuple[Array, Array], rows: Array) -> tuple[Array, Array]:
    return pair[0][rows], pair[1][rows]


def _check_choice(rows: Array, spoiled: Array, score: Array, bound: Array, values: Array, findings: Findings) -> None:
    """By falling value, equals by rising row, and none left out that is larger for certain."""
    for n, chosen in enumerate(rows):
        if spoiled[n]:
            if not (np.isnan(values[n]).all() and (chosen == np.arange(len(chosen))).all()):
                raise DifferenceError("a row with NaN or infinity: expected NaN and the first rows, got others")
            continue
        ordered = (values[n][:-1] > values[n][1:]) | ((values[n][:-1] == values[n][1:]) & (chosen[:-1] < chosen[1:]))
        if not ordered.all() or len(set(chosen.tolist())) != len(chosen):
            raise DifferenceError("the largest scores: expected them by falling value, equals by rising row")
        rest = np.setdiff1d(np.arange(score.shape[1]), chosen)
        if not rest.size:
            continue
        # Scores are rounded to float32 before they are compared.
        slack = bound[n] + 2.0**-24 * np.abs(score[n]) + 2.0**-149
        least, most = (score[n] + slack)[chosen].min(), (score[n] - slack)[rest].max()
        if least < most:
            raise DifferenceError("the largest scores: a larger one was left out")
        findings.near_ties += int(score[n][chosen].min() < score[n][rest].max())


def _check_ranks(
    problem: Problem, findings: Findings, ranks: Array, targets: Array, spoiled: Array, scores: tuple[Array, Array]
) -> None:
    score, bound = scores
    slack: Any = bound + 2.0**-24 * np.abs(score) + 2.0**-149
    for n, target in enumerate(targets):
        if spoiled[n]:
            least = most = problem.out
        else:
            own, own_slack = score[n, target], slack[n, target]
            least = int((score[n] - slack[n] > own + own_slack).sum())
            most = int((score[n] + slack[n] >= own - own_slack).sum()) - 1
        if not least <= ranks[n] <= most:
            raise DifferenceError(f"rank of row {target}: expected {least} to {most}, got {ranks[n]}")
    findings.comparisons += 1
    findings.elements += len(targets)
    findings.by_layer[problem.layer] = findings.by_layer.get(problem.layer, 0) + 1
