"""Layers of a model: its gates, its outermost layers of some kind, layers by name patterns; and what wraps them."""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from blockgate.errors import InvalidInputError, invalid
from blockgate.gates import Gate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = [
    "check_patterns",
    "first_match",
    "gate_label",
    "gate_names",
    "holds_shards",
    "is_sharded",
    "matches",
    "named_gates",
    "outermost",
    "own_class",
    "unwrapped",
]

Value = TypeVar("Value")


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` names a module, or one that contains it.

    Patterns are those of a shell (`*`, `?`, `[...]`); `*` reaches across dots. "encoder" and "encoder.*" both mean all
    that is inside of `encoder`; "*.linear1" means every `linear1` below the top.
    """
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:length]), pattern) for length in range(1, len(parts) + 1))


def first_match(patterns: Mapping[str, Value], names: Sequence[str]) -> tuple[str, Value] | None:
    """The first pattern that matches one of a module's names, and what it maps to."""
    return next(((p, value) for p, value in patterns.items() if any(matches(p, name) for name in names)), None)


def check_patterns(patterns: Mapping[str, object], layers: Sequence[Sequence[str]]) -> None:
    """Raises a clear error if a pattern comes first for no layer (each given by its names): it would do nothing."""
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise invalid("name pattern", expected="a string", got=pattern, remedy="'*' matches all.")
    used = {match[0] for names in layers if (match := first_match(patterns, names))}
    for pattern in patterns:
        if pattern in used:
            continue
        shown = ", ".join(repr(names[0]) for names in layers[:12]) + (", ..." if len(layers) > 12 else "")
        hidden = any(matches(pattern, name) for names in layers for name in names)
        raise invalid(
            "name pattern",
            expected="one that matches before another does" if hidden else f"one that matches a layer: {shown}",
            got=pattern,
            remedy="Put it before the wider patterns." if hidden else "'*' matches all.",
        )


def named_gates(model: nn.Module) -> dict[str, Gate]:
    """The gates of `model`, each once, under the names that reports use; at least one."""
    found = model.named_modules() if isinstance(model, nn.Module) else ()
    gates = {gate_label(path): module for path, module in found if isinstance(module, Gate)}
    if not gates:
        raise _no_gates(model)
    return gates


def gate_names(model: nn.Module) -> dict[Gate, list[str]]:
    """The gates of `model` and all names of each: a layer that is used in several places has several; at least one."""
    names: dict[Gate, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False) if isinstance(model, nn.Module) else ():
        if isinstance(module, Gate):
            names.setdefault(module, []).append(name)
    if not names:
        raise _no_gates(model)
    return names


def gate_label(path: str) -> str:
    """The name that reports use for the gate at `path`: fc.gate is fc, lstm.gate_ih_l0 is lstm.ih_l0."""
    owner, _, name = path.rpartition(".")
    if name == "gate":
        return owner or path
    return ".".join(part for part in (owner, name.removeprefix("gate_")) if part)


def outermost(model: nn.Module, kinds: tuple[Any, ...], name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of the outermost layers of these kinds, once for every place; `name` is that of `model`."""
    if isinstance(model, kinds):
        yield name, model
        return
    for child_name, child in model._modules.items():
        if child is not None:
            yield from outermost(child, kinds, f"{name}.{child_name}" if name else child_name)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside what torch.compile and DistributedDataParallel put around it."""
    while isinstance(model, nn.Module):
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            break
        model = inner
    return model


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, as it was before `fully_shard` put one of its own in front."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = type(module)
    return kind.__mro__[2] if fsdp is not None and isinstance(module, fsdp.FSDPModule) else kind


def holds_shards(model: nn.Module) -> bool:
    """Whether the parameters of a model are spread over processes, also where a call has left them whole for now."""
    # The mark of fully_shard, which keeps the weights of the outermost module whole after a call in eval mode.
    marked = any(getattr(module, "_is_fsdp_managed_module", False) for module in model.modules())
    return marked or any(map(is_sharded, model.parameters()))


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is spread over processes."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "full_tensor")


def _no_gates(model: object) -> InvalidInputError:
    return invalid(
        "model",
        expected="one with gated layers",
        got=type(model).__name__,
        remedy="Convert it with bg.sparsify_, or build it with bg.DynamicSparseLinear.",
    )
