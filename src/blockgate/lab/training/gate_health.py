"""Whether gates still choose: a few facts for the logs of a run, from the record of their decisions."""

from __future__ import annotations

import torch
from torch import nn

from blockgate.gates import Gate
from blockgate.inspect import GateRecord

__all__ = ["gate_facts", "has_gates"]

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
