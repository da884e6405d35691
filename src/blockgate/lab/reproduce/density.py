"""The share of blocks or weights that inputs really meet, beside the sparsity that was asked for."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from blockgate.inspect.table import to_percent
from blockgate.lab.reproduce.arms import Arm

__all__ = ["asked_and_open", "density_of", "described", "mean_density", "open_share"]


def density_of(result: dict[str, Any]) -> float:
    """Of the layers of one run, without their gates, as measured on the test data."""
    costs = result["costs"]
    return float((costs["matrix_macs"] - costs["gate_macs"]) / costs["matrix_macs_dense"])


def mean_density(results: Sequence[dict[str, Any]]) -> float | None:
    """Of all seeds of an arm; None without results."""
    return statistics.mean(map(density_of, results)) if results else None


def open_share(arm: Arm, results: Sequence[dict[str, Any]]) -> str:
    """Such as "10.2%"; empty for dense arms, which have all of their weights."""
    return "" if arm.percent is None or arm.facts.is_small or not results else to_percent(mean_density(results))


def asked_and_open(arm: Arm, results: Sequence[dict[str, Any]]) -> str:
    """Such as "90% (10.2% open)"; empty without a sparsity, and without the rest for small dense models."""
    share = open_share(arm, results)
    return ("" if arm.percent is None else f"{arm.percent}%") + (f" ({share} open)" if share else "")


def described(arm: Arm, results: Sequence[dict[str, Any]]) -> str:
    """What pictures and lists call an arm: its label, the sparsity that was asked for, and what is open."""
    return ", ".join(filter(None, (arm.label, asked_and_open(arm, results))))
