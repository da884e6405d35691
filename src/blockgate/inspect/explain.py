"""`explain`: which path every gated or packed layer of a model takes, why not a faster one, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from blockgate.errors import invalid
from blockgate.find import outermost
from blockgate.inspect.table import text_columns
from blockgate.runtime import RUNNABLE
from blockgate.runtime.packed_paired import PackedPairedLinear
from blockgate.runtime.plan import FUSED, PATHS, Plan

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Explanation", "LayerPath", "explain"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPath:
    """How one layer ran."""

    layer: str
    kind: str
    path: str
    """"fused native", "separate ops", "step by step" or "reference", from the fastest to the slowest; "not run"."""
    why: str
    """Why it was not the fastest path."""
    remedy: str
    """What to do about it."""
    figures: str
    """Of the native calls like this one so far: which way they run now, and what it and the other ways take."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A table of layers and their paths. Prints as text."""

    layers: tuple[LayerPath, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it in lists, dicts and strings, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [[row.layer or "(model)", row.kind, row.path, row.why, row.remedy, row.figures] for row in self.layers]
        fused = sum(row.path == FUSED for row in self.layers)
        table = text_columns(["layer", "kind", "path", "why", "what to do", "calls so far"], rows)
        return f"{table}\n{fused} of {len(self.layers)} layers ran in one native call"

    __repr__ = __str__


def explain(model: nn.Module, example_input: Tensor | tuple[Any, ...] | Mapping[str, Any]) -> Explanation:
    """How the gated and packed layers of `model` run for an input: the path, the reason, what to do about it.

    The model runs once, just as it is called: in its present mode, with gradients unless they are switched off. To see
    how inference runs, call it after `model.eval()` and under `torch.inference_mode()`.

    Args:
        model: any model with gated or packed layers.
        example_input: what to call the model with: a tensor, a tuple of arguments, or a dict of keyword arguments.

    Returns:
        The table; print it. A layer that is used several times is shown with its slowest call.
    """
    if not isinstance(model, nn.Module):
        raise invalid("explain", expected="an nn.Module", got=type(model).__name__, remedy="Pass a model or a layer.")
    layers: dict[nn.Module, str] = {}
    for name, layer in outermost(model, RUNNABLE):
        # Matrices of a paired MLP only pass on their input: the MLP has the plan.
        if not isinstance(layer, PackedPairedLinear):
            layers.setdefault(layer, name)
    if not layers:
        raise invalid(
            "explain",
            expected="a model with gated or packed layers",
            got=type(model).__name__,
            remedy="Convert it with bg.sparsify_, or pack it with bg.pack.",
        )
    plans: dict[nn.Module, list[Plan]] = {layer: [] for layer in layers}

    def see(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plans[layer].append(layer.plan(*args, **kwargs))

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(see, with_kwargs=True).remove)
        if isinstance(example_input, Mapping):
            model(**example_input)
        elif type(example_input) is tuple:  # a PackedSequence is a tuple too, but one argument
            model(*example_input)
        else:
            model(example_input)
    return Explanation(tuple(_row(name, layer, plans[layer]) for layer, name in layers.items()))


NOT_RUN = Plan("not run", "the model did not call it", "Its weights may be read without it: see `bg.sparsify_`.")


def _row(name: str, layer: nn.Module, plans: list[Plan]) -> LayerPath:
    plan = max(plans, key=lambda plan: PATHS.index(plan.path)) if plans else NOT_RUN
    return LayerPath(layer=name, kind=type(layer).__name__, **plan._asdict())
