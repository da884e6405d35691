"""Activation checkpointing computes a forward pass again, and nobody must count it twice."""

from __future__ import annotations

import torch

__all__ = ["in_backward"]


def in_backward() -> bool:
    """Whether a forward pass is computed again within the backward one: it must meet the means of the first time."""
    if torch.compiler.is_compiling():
        return False
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1
