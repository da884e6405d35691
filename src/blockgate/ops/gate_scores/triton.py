"""The gate's scores on a GPU: a kernel for a few rows, torch's own product for more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["centred_scores", "scores_into"]

# With more rows, the weight is better read once for all of them.
FEW_ROWS = 4
_SCORES, _SIZE = 16, 128


@triton.jit
def _few_rows(
    key,
    weight,
    bias,
    mean,
    scores,
    num_scores,
    size,
    stride_n,
    stride_k,
    HAS_BIAS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    SCORES: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Program (n, part): SCORES scores of row n."""
    n, s = tl.program_id(0).to(tl.int64), tl.program_id(1) * SCORES + tl.arange(0, SCORES)
    there = s < num_scores
    total = tl.zeros([SCORES, SIZE], tl.float32)
    for first in range(0, size, SIZE):
        k = first + tl.arange(0, SIZE)
        value = tl.load(key + n * stride_n + k.to(tl.int64) * stride_k, mask=k < size, other=0.0)
        if HAS_MEAN:
            value -= tl.load(mean + k, mask=k < size, other=0.0)
        at = weight + s.to(tl.int64)[:, None] * size + k[None, :]
        total += tl.load(at, mask=there[:, None] & (k < size)[None, :], other=0.0) * value[None, :]
    result = tl.sum(total, 1)
    if HAS_BIAS:
        result += tl.load(bias + s, mask=there, other=0.0)
    tl.store(scores + n * num_scores + s, result, mask=there)


def scores_into(scores: Tensor, key: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor | None = None) -> None:
    """Writes weight (key - mean) + bias (N, S) to contiguous memory."""
    rows, size = key.shape
    if 0 < rows <= FEW_ROWS and key.dtype is torch.float32:
        programs = (rows, triton.cdiv(len(weight), _SCORES))
        _few_rows[programs](
            key,
            weight.contiguous(),
            scores if bias is None else bias,
            scores if mean is None else mean,
            scores,
            len(weight),
            size,
            *key.stride(),
            HAS_BIAS=bias is not None,
            HAS_MEAN=mean is not None,
            SCORES=_SCORES,
            SIZE=_SIZE,
        )
        return
    key = key if mean is None else key - mean
    if bias is None:
        torch.mm(key, weight.t(), out=scores)
    else:
        torch.addmm(bias, key, weight.t(), out=scores)


def centred_scores(key: Tensor, weight: Tensor, bias: Tensor, mean: Tensor) -> Tensor:
    """As `reference.centred_scores`; the mean is taken from the key, not from the bias."""
    scores = key.new_empty(len(key), len(weight))
    scores_into(scores, key, weight, bias, mean)
    return scores
