"""Launches by the cut that follows from shapes, or, where the user asks for it, by the fastest of a few cuts.

With `BLOCKGATE_TRITON_AUTOTUNE=1` in the environment, Triton times the cuts below at the first call of each kind and
keeps the fastest, on disk beside what it compiled. Kinds are told apart by features, blocks, types and how many rows a
program takes, not by how many blocks are open: a ramp of the sparsity is timed once, at its first call.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any

import triton

from blockgate.ops.gpu import interpreting

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CUTS", "run", "tuning"]

# What is tried, by kernel. Every cut gives right results for every shape.
CUTS: dict[str, tuple[dict[str, int], ...]] = {
    "rows_forward": (
        {"OUTPUTS": 8, "num_warps": 4},
        {"OUTPUTS": 8, "num_warps": 2},
        {"OUTPUTS": 16, "num_warps": 4},
        {"OUTPUTS": 32, "num_warps": 4},
        {"OUTPUTS": 64, "num_warps": 8},
    ),
    "tiles_forward": (
        {"ROWS": 16, "num_warps": 4, "num_stages": 3},
        {"ROWS": 32, "num_warps": 4, "num_stages": 3},
        {"ROWS": 32, "num_warps": 8, "num_stages": 2},
        {"ROWS": 64, "num_warps": 8, "num_stages": 1},
        {"ROWS": 64, "num_warps": 8, "num_stages": 3},
    ),
    "tiles_input_grad": (
        {"ROWS": 16, "num_warps": 4, "num_stages": 3},
        {"ROWS": 32, "num_warps": 4, "num_stages": 2},
        {"ROWS": 64, "num_warps": 4, "num_stages": 2},
        {"ROWS": 64, "num_warps": 8, "num_stages": 3},
    ),
    "tiles_weight_grad": (
        {"ROWS": 32, "num_warps": 4, "num_stages": 3},
        {"ROWS": 32, "num_warps": 8, "num_stages": 2},
        {"ROWS": 64, "num_warps": 8, "num_stages": 3},
    ),
}
# Arguments that tell calls of a kernel apart, where it has them; Triton adds the types of the tensors.
KEY = ("out_features", "in_features", "block_out", "block_in", "FORMAT", "TILE_WORDS", "PRECISION", "NEED_X")


def tuning() -> bool:
    """Whether cuts are timed. The interpreter's times would say nothing."""
    return os.environ.get("BLOCKGATE_TRITON_AUTOTUNE") == "1" and not interpreting()


def run(
    kernel: Any, programs: Callable[[dict[str, Any]], tuple[int, ...]], *args: Any, cut: dict[str, int], **fixed: Any
) -> None:
    """Launches a kernel of CUTS.

    Args:
        kernel: what to launch.
        programs: the numbers of programs of a cut.
        *args: the kernel's arguments.
        cut: the one that follows from shapes, with the names that CUTS has.
        **fixed: the other compile-time arguments.
    """
    if tuning():
        _tuned(kernel)[programs](*args, **fixed)
    else:
        kernel[programs(cut)](*args, **fixed, **cut)


@cache
def _tuned(kernel: Any) -> Any:
    """The kernel with all its cuts."""
    options = ("num_warps", "num_stages")
    configs = [
        triton.Config(
            {name: value for name, value in cut.items() if name not in options},
            **{name: value for name, value in cut.items() if name in options},
        )
        for cut in CUTS[kernel.fn.__name__]
    ]
    key = [name for name in KEY if name in kernel.arg_names]
    return triton.autotune(configs, key, cache_results=True)(kernel)
