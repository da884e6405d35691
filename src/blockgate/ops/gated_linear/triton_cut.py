"""How the work of the gated product is cut into programs on a GPU.

The cut follows from shapes only: a ramp of the sparsity compiles at most three variants, and results do not depend on
what was measured on the day. Nothing here needs Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from blockgate.ops.gpu import NotServedError

if TYPE_CHECKING:
    from blockgate.grid import BlockGrid

__all__ = [
    "FEW_ROWS",
    "WIDEST_BLOCK",
    "WORD",
    "FewRows",
    "block_sizes",
    "checked_launch",
    "few_rows",
    "power_of_two",
    "rows_at_once",
    "tile_words",
    "warps_for",
]

# Rows whose marks share a number.
WORD = 32
# Up to so many rows, each takes its own blocks; above, blocks take their rows.
FEW_ROWS = 16
# Inputs of a block that a program for one row holds.
WIDEST_BLOCK = 1024
# How many programs fill a large GPU twice.
ENOUGH_PROGRAMS = 432
# Inputs that a program for one row multiplies in one step, unless one block has more.
STEP_INPUTS = 128
# Bytes on their way that keep the memory of a large GPU busy: its rate times what a step waits.
ENOUGH_BYTES = 2 << 20
# Shorter sums wait less than the launch costs that adds their parts.
LEAST_STEPS = 12
# Steps of a part.
STEPS_OF_PART = 4
# Programs of a launch along its second and third dimension.
MOST_PROGRAMS = 65535


def power_of_two(size: int, least: int, most: int) -> int:
    """The power of two that holds `size`, between two others."""
    return max(least, min(most, 1 << max(0, size - 1).bit_length()))


def block_sizes(grid: BlockGrid) -> tuple[int, int]:
    """The size of a block, which may be larger than the weight."""
    return min(grid.block[0], grid.out_features), min(grid.block[1], grid.in_features)


def checked_launch(*counts: int) -> tuple[int, ...]:
    """The numbers of programs of a launch, which GPUs limit."""
    if max(counts[1:]) > MOST_PROGRAMS or counts[0] >= 1 << 31:
        raise NotServedError(f"a launch of {' x '.join(map(str, counts))} programs; GPUs take 2^31 x 65535 x 65535")
    return counts


class FewRows(NamedTuple):
    """The cut of a product of few rows.

    Args:
        width: inputs of a block, filled up.
        at_once: blocks of one step.
        outputs: of a program.
        steps: that the open blocks of an output take, in the mean.
        programs: for all outputs of all rows, if none share their open blocks.
        splits: how many programs share the open blocks of an output.
    """

    width: int
    at_once: int
    outputs: int
    steps: int
    programs: int
    splits: int


def few_rows(rows: int, entries: int, grid: BlockGrid, size: int) -> FewRows:
    """For `rows` rows with `entries` gates each, and weights of `size` bytes."""
    block_out, block_in = block_sizes(grid)
    width, outputs = power_of_two(block_in, 1, WIDEST_BLOCK), power_of_two(block_out, 8, 64)
    while outputs > 8 and rows * grid.out_blocks * -(-block_out // outputs) < ENOUGH_PROGRAMS:
        outputs //= 2
    at_once = max(1, STEP_INPUTS // width)
    steps = entries // grid.out_blocks // at_once
    programs = rows * grid.out_blocks * -(-block_out // outputs)
    return FewRows(
        width, at_once, outputs, steps, programs, splits_for(programs, steps, outputs * width * at_once * size)
    )


def splits_for(programs: int, steps: int, step_bytes: int) -> int:
    """How many programs share the open blocks of an output: several where `programs` would leave the memory idle."""
    return 1 if steps < LEAST_STEPS else max(1, min(ENOUGH_BYTES // (programs * step_bytes), steps // STEPS_OF_PART))


def tile_words(words: int, programs: int) -> int:
    """How many words of rows a program takes: four, or fewer where too few programs would be left."""
    size = 4
    while size > 1 and -(-words // size) * programs < ENOUGH_PROGRAMS:
        size //= 2
    return size


def rows_at_once(entries: int, num_blocks: int, tile_words: int) -> int:
    """Rows of one product: about what a tile's list of a block has."""
    expected = tile_words * WORD * entries / num_blocks
    return 16 if expected <= 24 else 32 if expected <= 48 else 64


def warps_for(sums: int) -> int:
    """How many warps hold so many sums in registers: at most 32 in each thread, and the factors beside them."""
    return 8 if sums > 4096 else 4
