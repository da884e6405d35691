"""What several tests share: an independent formula for the method, tolerances, error matching."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from blockgate.errors import BlockgateError

if TYPE_CHECKING:
    from blockgate.grid import BlockGrid

# Largest allowed difference, per dtype: (rtol, atol). The absolute part counts in units of the largest expected value
# (at least 1), since sums of many terms cancel. Never relaxed for a single test.
TOLERANCE = {
    torch.float64: (1e-10, 1e-12),
    torch.float32: (1e-4, 1e-5),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (2e-3, 2e-3),
}


def assert_close(actual: Tensor, expected: Tensor, name: str = "result") -> None:
    """Equal within the tolerance of `actual`'s dtype."""
    rtol, atol = TOLERANCE[actual.dtype]
    atol *= max(1.0, expected.detach().abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=rtol, atol=atol, msg=lambda m: f"{name}: {m}")


def dense_mask_linear(x: Tensor, weight: Tensor, bias: Tensor | None, gates: Tensor, grid: BlockGrid) -> Tensor:
    """The method as the paper prints it: one full, elementwise-gated matrix per row. x (N, n), gates (N, r, c)."""
    mask = gates.repeat_interleave(grid.block[0], -2).repeat_interleave(grid.block[1], -1)
    mask = mask[:, : grid.out_features, : grid.in_features]
    y = ((mask * weight) @ x.unsqueeze(-1)).squeeze(-1)
    return y if bias is None else y + bias


def expand(gates: Tensor, indices: Tensor, grid: BlockGrid) -> Tensor:
    """Compact gates (N, E) as a dense (N, r, c) tensor; entries of the same block add up."""
    dense = gates.new_zeros(gates.shape[0], grid.num_blocks).scatter_add(1, indices, gates)
    return dense.view(-1, grid.out_blocks, grid.in_blocks)


def gradients(y: Tensor, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Gradients of all inputs, zeros where y doesn't depend on one (nothing open, no rows)."""
    if not y.requires_grad:
        return [torch.zeros_like(t) for t in inputs]
    return list(torch.autograd.grad(y, inputs, grad, materialize_grads=True))


@contextmanager
def raises_blockgate(message: str, error: type[BlockgateError] = BlockgateError):
    """Expects one of our errors with this text in it, in the form expected / got / remedy."""
    with pytest.raises(error, match=re.escape(message)) as caught:
        yield caught
    text = str(caught.value)
    assert "expected" in text
    assert "got" in text
