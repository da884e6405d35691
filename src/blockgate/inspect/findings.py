"""What looks wrong with a gate, by its statistics, and what to do about it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blockgate.inspect.statistics import GateStatistics

__all__ = ["Finding", "judge"]

# A block is judged once the density lets expect this many openings of it.
JUDGED_OPENINGS = 20
# Agreement between inputs beyond chance: 0 if each drew its blocks at random, 1 if all open the same.
FROZEN_AGREEMENT = 0.7
# Measured density below this share of the target.
STARVED = 0.9


class Finding(NamedTuple):
    """Something that looks wrong with one gate."""

    gate: str
    """Name of its layer."""
    kind: str
    """"no rows", "few rows", "closed rows", "not finite", "few blocks", "dead blocks" or "frozen"."""
    message: str

    def __str__(self) -> str:
        return f"{self.gate}: {self.message}"


def judge(gate: GateStatistics) -> Iterator[tuple[str, str]]:
    """The kind and a sentence for whatever looks wrong with one gate."""
    density, target = gate.measured_density, gate.target_density
    if density is None or target is None:
        yield "no rows", "saw no rows: nothing called it inside the record."
        return
    if gate.empty_rows:
        yield (
            "closed rows",
            f"{gate.empty_rows} of {gate.rows} rows opened no block at all: no score was positive, and the layer's "
            "output was its bias. gate='margin' opens blocks for every row.",
        )
    if gate.open_counts.any() and gate.value_mean is None:
        yield "not finite", "some gate values are not finite: look for NaN or inf in its input and its parameters."
    if density < STARVED * target:
        yield (
            "few blocks",
            f"opens fewer blocks than asked for ({density:.1%} instead of {target:.1%}). Usually harmless; lower the "
            "gates' learning rate to change it.",
        )
    if gate.rows * target < JUDGED_OPENINGS:
        needed = math.ceil(JUDGED_OPENINGS / target)
        yield (
            "few rows",
            f"{gate.rows} rows are too few to look for collapse and dead blocks; record at least {needed}.",
        )
        return
    dead = int((gate.open_counts == 0).sum())
    if dead:
        yield (
            "dead blocks",
            f"{dead} of {gate.grid.num_blocks} blocks never opened in {gate.rows} rows (dead blocks): they get no "
            "gradient. A step of `blockgate.gates.BlockReviver` after every update brings them back "
            "(`--optimizer.revive 0.3` in `blockgate train`).",
        )
    overlap = gate.overlap().inputs
    if overlap is not None and density < 1 and (overlap - density) / (1 - density) > FROZEN_AGREEMENT:
        yield (
            "frozen",
            f"frozen: two inputs have {overlap:.1%} of their open blocks in common, at a density of {density:.1%}, and "
            f"{gate.shares(0.95).input_dependent:.1%} of the blocks depend on the input. Such a gate does "
            "hardly more than a static mask. gate='margin' and a lower learning rate for the gates keep it choosing.",
        )
