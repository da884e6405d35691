"""Modules that count their changes, so that nobody has to look for them at every call."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

__all__ = ["CountsChanges"]


class CountsChanges(nn.Module):
    """Counts in `changes` whatever may change what the module computes: assignments, loading, moves and casts.

    In-place edits of a tensor's values are not seen, nor writes into the module's dictionaries.
    """

    changes: int = 0

    def count_change(self) -> None:
        """To be called after a change that comes another way."""
        self.__dict__["changes"] = self.changes + 1

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.count_change()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self.count_change()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As nn.Module's."""
        super().register_parameter(name, param)
        self.count_change()

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """As nn.Module's."""
        super().register_buffer(name, tensor, persistent)
        self.count_change()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        applied = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.count_change()
        return applied

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.count_change()
