"""The block grid: how a weight matrix is cut into blocks, and how many of them stay open."""

from __future__ import annotations

import math
import operator
import os
from dataclasses import dataclass

from blockgate.errors import invalid

__all__ = ["BlockGrid", "as_int", "check_seed", "check_size", "check_sparsity", "check_threads", "open_blocks"]

# The largest size of anything; native code has the same bound.
MOST = 1 << 40


@dataclass(frozen=True, slots=True, init=False)
class BlockGrid:
    """The cut of an (out_features, in_features) weight into blocks of at most `block` (out, in) entries.

    Blocks in the last row and column are smaller where the block size doesn't divide the weight. Block (i, j) has the
    index i * in_blocks + j.

    Args:
        out_features: rows of the weight.
        in_features: columns of the weight.
        block: block size, one int for squares or (out, in). A block may be larger than the weight.
    """

    out_features: int
    in_features: int
    block: tuple[int, int]

    def __init__(self, out_features: int, in_features: int, block: int | tuple[int, int]) -> None:
        pair = block if isinstance(block, (tuple, list)) else (block, block)
        if len(pair) != 2:
            raise invalid("block_size", expected="one int or (out, in)", got=block, remedy="Pass 128 or (128, 64).")
        object.__setattr__(self, "out_features", check_size("out_features", out_features))
        object.__setattr__(self, "in_features", check_size("in_features", in_features))
        block_out, block_in = check_size("block_size (out)", pair[0]), check_size("block_size (in)", pair[1])
        object.__setattr__(self, "block", (block_out, block_in))

    @property
    def out_blocks(self) -> int:
        """Rows of blocks, r."""
        return -(-self.out_features // self.block[0])

    @property
    def in_blocks(self) -> int:
        """Columns of blocks, c."""
        return -(-self.in_features // self.block[1])

    @property
    def num_blocks(self) -> int:
        """Number of blocks, r * c."""
        return self.out_blocks * self.in_blocks

    def slices(self, index: int) -> tuple[slice, slice]:
        """The rows and columns of the weight that block `index` covers."""
        row, column = divmod(index, self.in_blocks)
        block_out, block_in = self.block
        return (
            slice(row * block_out, min((row + 1) * block_out, self.out_features)),
            slice(column * block_in, min((column + 1) * block_in, self.in_features)),
        )


def as_int(value: object) -> int | None:
    """`value` as an int if it is a whole number of any integer type, NumPy's included; otherwise None."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_size(what: str, size: object) -> int:
    """`size` as an int if it is a positive whole number that sums and products of sizes can't drive out of 64 bits."""
    number = as_int(size)
    if number is None or number <= 0:
        raise invalid(what, expected="a positive int", got=size, remedy="Sizes count from 1.")
    if number > MOST:
        remedy = "A block as large as the weight is enough to have one block."
        raise invalid(
            what, expected="at most 2^40", got=size, remedy=remedy if "block" in what else "Check the number."
        )
    return number


def check_threads(what: str, threads: object) -> int:
    """`threads` as an int if it is a number of threads that this machine can sensibly run."""
    number, most = as_int(threads), 8 * (os.cpu_count() or 1)
    if number is None or not 1 <= number <= most:
        raise invalid(what, expected=f"1 to {most}", got=threads, remedy="Leave it out for torch's own number.")
    return number


def check_seed(what: str, seed: object) -> int:
    """`seed` as an int if torch's generators take it."""
    number = as_int(seed)
    if number is None or not 0 <= number < 1 << 62:
        raise invalid(what, expected="a whole number from 0, below 2^62", got=seed, remedy="Any will do.")
    return number


def check_sparsity(sparsity: float, what: str = "sparsity") -> float:
    """Returns `sparsity` as a float if it lies in [0, 1)."""
    if isinstance(sparsity, bool) or not isinstance(sparsity, (int, float)) or not 0 <= sparsity < 1:
        raise invalid(
            what,
            expected="a number in [0, 1)",
            got=sparsity,
            remedy="Sparsity is the share of blocks that stay closed; at least one block always opens.",
        )
    return float(sparsity)


def open_blocks(sparsity: float, num_blocks: int) -> int:
    """How many of `num_blocks` blocks a `sparsity` leaves open: nearest integer, halves up, at least one.

    The tiny term keeps halves such as (1 - 0.9) * 15 from falling to the wrong side in binary arithmetic.
    """
    num_blocks = check_size("num_blocks", num_blocks)
    return max(1, math.floor((1 - check_sparsity(sparsity)) * num_blocks + 0.5 + 1e-9))
