"""Values in the checkpoints of a module that are neither parameters nor buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockgate.changes import CountsChanges
from blockgate.errors import BlockgateError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["KeepsSparsity", "KeepsValues"]


class KeepsValues(CountsChanges):
    """A module whose state dict holds values that are no buffers: `.half()` must not round them, DDP not send them.

    They may be absent when a state dict is loaded. Each is an attribute of the same name too: there
    torch.distributed.checkpoint looks for what it finds in a state dict.
    """

    # Whether the state dict holds the values. False for readers that want parameters and buffers only.
    saves_values: bool = True

    def kept_values(self) -> dict[str, Tensor]:
        """The values by name, tensors without dimensions on the CPU."""
        return {}

    def take_kept(self, name: str, value: Tensor) -> None:
        """Makes a loaded value its own."""

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """As nn.Module's; with recurse=False, as torch.distributed.checkpoint lists what to load, the values too."""
        yield from super().named_buffers(prefix, recurse, remove_duplicate)
        if not recurse:
            for name, value in self.kept_values().items():
                yield f"{prefix}.{name}" if prefix else name, value

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.saves_values:
            destination.update({prefix + name: value for name, value in self.kept_values().items()})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        loaded = {name: state_dict.pop(prefix + name, None) for name in self.kept_values()}
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name, value in loaded.items():
            if value is None or (isinstance(value, Tensor) and value.is_meta):
                continue
            try:
                self.take_kept(name, value)
            except (BlockgateError, TypeError, ValueError, RuntimeError) as error:
                # The last argument collects what load_state_dict then raises, with every other fault.
                args[-1].append(f"{prefix}{name}: {error}")


class KeepsSparsity(KeepsValues):
    """One with a `target_sparsity` that checkpoints hold."""

    target_sparsity: float

    @property
    def sparsity(self) -> Tensor:
        """The target sparsity as checkpoints hold it."""
        return self.kept_values()["sparsity"]

    @sparsity.setter
    def sparsity(self, value: Tensor) -> None:
        self.take_kept("sparsity", value)

    def kept_values(self) -> dict[str, Tensor]:
        """What checkpoints hold beside parameters and buffers."""
        return {"sparsity": torch.tensor(self.target_sparsity, dtype=torch.float64, device="cpu")}

    def take_kept(self, name: str, value: Tensor) -> None:
        """The sparsity of a checkpoint."""
        if name == "sparsity":
            self.target_sparsity = float(value)
