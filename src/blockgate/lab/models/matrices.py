"""How the matrices of a model are chosen and cut: the config of gates, and the makers of a kind by its name."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import nn

from blockgate.errors import invalid
from blockgate.gates import Gate
from blockgate.lab.baselines import MATRICES, Matrices

__all__ = ["GateConfig", "matrices", "start_gates"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GateConfig:
    """How dynamic matrices are cut and gated; see `bg.DynamicSparseLinear`."""

    block_size: int = 128
    """Rows and columns of a block."""
    sparsity: float = 0.5
    """Share of closed blocks, in [0, 1); where a ramp is set, the ramp decides."""
    key_size: int | Literal["all", "auto"] = "auto"
    """Input features that a gate reads: a number, all, or auto for at most 128."""
    gate_hidden: int | None = None
    """Width of a hidden layer in the gate."""
    normalise: Literal["mean", "rms", "none"] | None = None
    """What topk gates are scaled to, rms if unset; the paper's is the mean."""
    select: Literal["global", "per_row"] | None = None
    """Choose as many in every row of blocks, as topk does if unset and rows have at least 4, or among all blocks."""
    kind: Literal["topk", "eq1", "softmax_sum", "sigmoid"] = "topk"
    """topk, eq1 (the paper's: topk with mean and global), or an alternative; these take neither of the two above."""
    near_dense: bool = False
    """Start with all gates close to 1, as for matrices that were trained without; otherwise half of them start at 0."""

    def options(self) -> dict[str, Any]:
        """Keyword options of a gated layer."""
        options = asdict(self)
        options["gate"] = options.pop("kind")
        del options["near_dense"]
        sizes = {"all": {"key_size": None}, "auto": {}}
        key_size = options.pop("key_size")
        return options | (sizes[key_size] if isinstance(key_size, str) else {"key_size": key_size})


def start_gates(model: nn.Module, config: GateConfig) -> None:
    """Gives the gates of a fresh model the start that its config asks for."""
    for module in model.modules():
        if config.near_dense and isinstance(module, Gate):
            module.reset_near_dense()


def matrices(kind: str) -> Matrices:
    """The makers of a kind by its name."""
    if kind not in MATRICES:
        raise invalid("matrices", expected=f"one of {tuple(MATRICES)}", got=kind, remedy="Check the name.")
    return MATRICES[kind]
