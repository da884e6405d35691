"""A number of open blocks that torch.compile takes for a variable."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

__all__ = ["carry"]


def carry(number: int) -> Tensor:
    """A tensor without memory whose length is `number`.

    torch.compile takes an int of a module for a constant and compiles again whenever it changes; the length of a tensor
    can be a variable of the graph. Marking it says so before the compiler asks, for every length from 1 on; a model
    that was made before the compiler was imported is marked when its sparsity first changes.
    """
    carrier = torch.empty(number, 0, device="cpu")
    if dynamo := sys.modules.get("torch._dynamo.decorators"):
        dynamo.mark_unbacked(carrier, 0)
    return carrier
