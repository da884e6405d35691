"""Gated layers as a checkpoint describes them: class and options, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from blockgate.convert.candidates import find_candidates, refusal
from blockgate.convert.forms import gated_forms
from blockgate.errors import BlockgateError, InvalidInputError, invalid
from blockgate.gates import Gate, make_gate
from blockgate.spec import GateSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["describe_layers", "gate_prefixes", "rebuild_layers"]


def describe_layers(model: nn.Module) -> dict[str, dict[str, Any]]:
    """For the first name of every gated layer: its class and the options that make it of a dense one."""
    forms = set(gated_forms().values())
    return {
        candidate.name: {"class": type(candidate.module).__name__, "options": _spec_of(candidate.module).to_json()}
        for candidate in find_candidates(model)
        if type(candidate.module) in forms
    }


def rebuild_layers(model: nn.Module, described: Mapping[str, Mapping[str, Any]]) -> dict[nn.Module, nn.Module]:
    """For every dense layer of `model` that the description has gated: the gated one. The model is not touched."""
    made: dict[nn.Module, nn.Module] = {}
    for name, entry in described.items():
        try:
            layer = model.get_submodule(name)
        except AttributeError as error:
            raise _mismatch(name, entry, "no layer of this name") from error
        form = gated_forms().get(type(layer))
        if type(layer).__name__ == entry["class"]:
            _check_options(name, layer, entry)
        elif form is None or form.__name__ != entry["class"] or refusal(layer):
            raise _mismatch(name, entry, refusal(layer) or type(layer).__name__)
        else:
            try:
                made[layer] = form.from_dense(layer, spec=_saved_spec(name, entry))
            except BlockgateError as error:
                raise InvalidInputError(f"layer {name!r}: {error}") from error
    return made


def gate_prefixes(model: nn.Module) -> tuple[str, ...]:
    """How the keys of gates start in the state dict of `model`."""
    modules = model.named_modules(remove_duplicate=False)
    return tuple(f"{name}." for name, module in modules if isinstance(module, Gate))


def _mismatch(name: str, entry: Mapping[str, Any], got: object) -> InvalidInputError:
    return invalid(
        f"layer {name!r}",
        expected=f"{entry['class']} or its dense form, as in the checkpoint",
        got=got,
        remedy="Pass a model like the one that was saved.",
    )


def _check_options(name: str, layer: nn.Module, entry: Mapping[str, Any]) -> None:
    """Raises unless the gates of this layer follow the options of the checkpoint."""
    saved = _saved_spec(name, entry)
    for gate in _gates_of(layer):
        if not _follows(gate, saved):
            raise invalid(
                f"layer {name!r}",
                expected=f"the options of the checkpoint, {saved}",
                got=gate.spec,
                remedy="Pass a model like the one that was saved, or the dense one.",
            )


def _saved_spec(name: str, entry: Mapping[str, Any]) -> GateSpec:
    try:
        return GateSpec.from_json(entry["options"])
    except BlockgateError as error:
        raise InvalidInputError(f"layer {name!r}: {error}") from error


def _spec_of(layer: nn.Module) -> GateSpec:
    """The spec that makes this layer of its dense form; an error where its gates can't all be made by one."""
    gates = _gates_of(layer)
    spec = gates[0].spec_to_make
    if not all(_follows(gate, spec) for gate in gates):
        raise invalid(
            type(layer).__name__,
            expected="the same options for all gates of one layer",
            got=[gate.spec for gate in gates],
            remedy="Save the state_dict, and build the model in code.",
        )
    return spec


def _follows(gate: Gate, spec: GateSpec) -> bool:
    """Whether the spec makes such a gate, but for its sparsity of now."""
    grid = spec.grid(gate.grid.out_features, gate.grid.in_features)
    return make_gate(spec, grid, device="meta").rule == gate.rule


def _gates_of(layer: nn.Module) -> list[Gate]:
    return [module for module in layer.modules() if isinstance(module, Gate)]
