"""What must hold before anything is timed: gates that open what was asked for, and results like the reference's."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import torch
from torch import Tensor, nn

from blockgate.errors import BlockgateError
from blockgate.gates import Gate
from blockgate.runtime.packed import PackedBlocks

__all__ = [
    "PACKED_TYPES",
    "SHORT_NAMES",
    "by_reference",
    "open_gates",
    "packed_dense_name",
    "relative_error",
    "require_close",
    "require_density",
]

# The types that weights are packed to, by the short names that tables and options use, and back.
PACKED_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
SHORT_NAMES = {dtype: name for name, dtype in PACKED_TYPES.items()}

# Largest relative error against the reference that may still be timed. A rounding difference now and then turns the
# choice between two blocks of nearly equal score, which changes an output by a few percent; a wrong kernel changes all.
MOST_ERROR = 0.1


def packed_dense_name(dtype: torch.dtype) -> str:
    """What the dense model, packed by blockgate, is called in every table."""
    return f"blockgate {SHORT_NAMES[dtype]}, dense"


def open_gates(model: nn.Module) -> nn.Module:
    """Fresh gates whose scores are all positive, so that exactly the asked blocks open."""
    for module in model.modules():
        if isinstance(module, Gate):
            module.reset_parameters()
            nn.init.constant_(module.bias, 5.0)
    return model


@torch.no_grad()
def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference as a share of the norm of what was expected."""
    return float(((got - want).norm() / want.norm()).detach())


def require_close(got: Tensor, want: Tensor, what: str, most: float = MOST_ERROR) -> None:
    """Raises unless a result is right up to a relative error of `most`: nothing wrong is ever timed."""
    error = relative_error(got, want)
    if not error < most:
        raise BlockgateError(
            f"bench: expected {what} to be right before timing it, got a relative error of {error:.2g}. No speed is "
            "reported."
        )


def require_density(gates: Tensor, gate: Gate, what: str) -> float:
    """The measured density of gates (..., r, c), which must be the target of their gate."""
    density = (gates != 0).float().mean().item()
    if not abs(density - gate.target_density) < 1e-6:
        raise BlockgateError(
            f"bench: expected {what} to open {gate.target_density:.4f} of its blocks before timing it, got "
            f"{density:.4f}. No speed is reported."
        )
    return density


@torch.no_grad()
def by_reference(model: nn.Module, packed: nn.Module | None = None) -> nn.Module:
    """A copy of a gated model that computes with the reference only; with the rounded weights of `packed` if given."""
    judge = copy.deepcopy(model)
    for module in judge.modules():
        if isinstance(module, Gate):
            module.spec = replace(module.spec, backend="reference")
    for name, blocks in [] if packed is None else packed.named_modules():
        if isinstance(blocks, PackedBlocks):
            # "layers.0.ih_l0.packed" holds "layers.0.weight_ih_l0", "decoder.packed" holds "decoder.weight".
            layer = name.removesuffix("packed")
            weight = re.sub(r"([ih]h_l\d+(_reverse)?)\.$", r"weight_\1", layer)
            judge.get_parameter(weight if weight != layer else f"{layer}weight").copy_(blocks.weight())
    return judge
