"""Exact scores of an output layer and what comes of them, in plain PyTorch: the judge of the screened ones.

The score of a row w of the weight for an input x is defined to the last bit, so that the same rows win on every
machine: products of float32 numbers are exact in float64; they are summed in float64, in 16 partial sums of every 16th
input, which are then added in halves; then comes the bias, and the result is rounded to float32. Rows of equal score
come in the order of their numbers. NaN or inf among the inputs makes all scores NaN.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["exact_scores", "screened_rank", "screened_topk"]

LANES = 16


def exact_scores(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Scores (N, V) of float32 for x (N, n), weight (V, n) and bias (V) or None."""
    padding = (0, -x.shape[1] % LANES)
    inputs, weights = (F.pad(t.double(), padding).unflatten(1, (-1, LANES)) for t in (x, weight))
    sums = x.new_zeros(x.shape[0], weight.shape[0], LANES, dtype=torch.float64)
    for chunk in range(inputs.shape[1]):
        sums = sums + inputs[:, None, chunk] * weights[None, :, chunk]
    half = LANES // 2
    while half:
        sums = sums[..., :half] + sums[..., half : 2 * half]
        half //= 2
    scores = sums.squeeze(-1)
    if bias is not None:
        scores = scores + bias.double()
    finite = x.isfinite().all(dim=1, keepdim=True)
    return scores.float().masked_fill(~finite, torch.nan)


def screened_topk(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    codes: Tensor,  # noqa: ARG001
    steps: Tensor,  # noqa: ARG001
    rows: Tensor,  # noqa: ARG001
    k: int,
) -> tuple[Tensor, Tensor]:
    """The k largest scores (N, k) and their rows, by falling score, equals by rising row."""
    ordered = exact_scores(x, weight, bias).sort(dim=1, descending=True, stable=True)
    return ordered.values[:, :k].contiguous(), ordered.indices[:, :k].contiguous()


def screened_rank(
    x: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    codes: Tensor,  # noqa: ARG001
    steps: Tensor,  # noqa: ARG001
    rows: Tensor,  # noqa: ARG001
) -> Tensor:
    """How many rows (N,) come before that of each target (N,), in the order of `screened_topk`; V for NaN scores."""
    scores = exact_scores(x, weight, bias)
    own = scores.gather(1, targets[:, None])
    numbers = torch.arange(weight.shape[0], device=x.device)
    before = (scores > own) | ((scores == own) & (numbers < targets[:, None]))
    return before.sum(dim=1).masked_fill(own.squeeze(1).isnan(), weight.shape[0])
