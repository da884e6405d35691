"""Whether gates still choose: a few facts for the logs of a run, from the record of their decisions."""

from __future__ import annotations

import torch
from torch import nn

from blockgate.gates import Gate
from blockgate.inspect import GateRecord

__all__ = ["GateWarnings", "gate_facts", "has_gates"]

# A block that opens for less or more of the inputs than this counts as always off or always on (the paper's rule).
RARELY, MOSTLY = 0.05, 0.95


def has_gates(model: nn.Module) -> bool:
    """Whether a model has any gated layer."""
    return any(isinstance(module, Gate) for module in model.modules())


def gate_facts(record: GateRecord) -> dict[str, float]:
    """Measured density, and the shares of input-dependent, dead and always open blocks, over those of all layers."""
    opened = torch.cat([gate.frequency().flatten() for gate in record.gates.values() if gate.rows])
    depends = (opened >= RARELY) & (opened <= MOSTLY)
    return {
        "density": float(opened.mean()),
        "input_dependent": float(depends.double().mean()),
        "dead_blocks": float((opened == 0).double().mean()),
        "always_open": float((opened > MOSTLY).double().mean()),
    }


class GateWarnings:
    """What looks wrong with the gates of a run, each thing once.

    Args:
        reviving: whether the run brings dead blocks back: then they are a fact for the table, and no warning.
    """

    def __init__(self, *, reviving: bool) -> None:
        # How many rows are recorded is the run's own choice.
        self.silent = {"few rows"} | ({"dead blocks"} if reviving else set())
        self.said: set[tuple[str, str]] = set()

    def new(self, record: GateRecord) -> list[str]:
        """The sentences that were not given before, for this gate and this kind of thing."""
        found = [one for one in record.findings() if one.kind not in self.silent and one[:2] not in self.said]
        self.said.update(one[:2] for one in found)
        return [str(one) for one in found]
