"""Gated layers as a checkpoint describes them: class and options, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from blockgate.convert.candidates import find_candidates, refusal
from blockgate.convert.forms import gated_classes, gated_forms
from blockgate.convert.pairs import Pair, find_pairs
from blockgate.errors import BlockgateError, InvalidInputError, invalid
from blockgate.find import own_class
from blockgate.gates import Gate, make_gate
from blockgate.layers.conv1d import stores_transposed
from blockgate.layers.mlp import DynamicSparseMLP
from blockgate.layers.qrnn import QRNN
from blockgate.runtime.recurrent import matrix_names
from blockgate.spec import GateSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["check_described", "describe_layers", "gate_prefixes", "planned_gates", "rebuild_layers"]


def describe_layers(model: nn.Module) -> dict[str, dict[str, Any]]:
    """For the first name of every gated layer: its class and the options that make it of a dense one."""
    forms = set(gated_classes())
    return {
        candidate.name: {"class": own_class(candidate.module).__name__, "options": _spec_of(candidate.module).to_json()}
        for candidate in find_candidates(model)
        if own_class(candidate.module) in forms
    }


def check_described(described: object) -> dict[str, dict[str, Any]]:
    """The description of layers that a config has, if it is one."""
    whole: dict[str, Any] = described if isinstance(described, dict) else {"": described}
    for name, entry in whole.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("options"), dict) or "class" not in entry:
            raise invalid(
                "config",
                expected=f"class and options of layer {name!r}",
                got=entry,
                remedy="Load a folder that save_pretrained wrote, unchanged.",
            )
    return whole


def rebuild_layers(model: nn.Module, described: Mapping[str, Mapping[str, Any]]) -> dict[Any, nn.Module]:
    """What comes into the place of what, for `replace_layers`: the gated layers of the description that are dense in
    `model`, which is not touched."""
    made: dict[Any, nn.Module] = {}
    pairs = _dense_pairs(model, described)
    for name, entry in described.items():
        if name in pairs:
            try:
                made |= pairs[name].make(_saved_spec(name, entry))
            except BlockgateError as error:
                raise InvalidInputError(f"layer {name!r}: {error}") from error
            continue
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


def planned_gates(model: nn.Module, described: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    """The parameters that the gates of described layers will have, by name, without memory.

    What a description asks for may be larger than any memory, and than the file that came with it.
    """
    planned: dict[str, Tensor] = {}
    pairs = _dense_pairs(model, described)
    for name, entry in described.items():
        try:
            layer = pairs[name].up if name in pairs else model.get_submodule(name)
        except AttributeError as error:
            raise _mismatch(name, entry, "no layer of this name") from error
        if type(layer) not in gated_forms():
            continue
        spec = _saved_spec(name, entry)
        for below, sizes in _matrices_of(layer).items():
            try:
                gate = make_gate(spec, spec.grid(*sizes), device="meta")
            except BlockgateError as error:
                raise InvalidInputError(f"layer {name!r}: {error}") from error
            except (RuntimeError, TypeError, OverflowError) as error:
                raise invalid(
                    f"options of layer {name!r}",
                    expected="a gate that fits the layer",
                    got=entry["options"],
                    remedy="Save it again.",
                ) from error
            path = ".".join(filter(None, (name, below)))
            planned |= {f"{path}.{key}": value for key, value in gate.named_parameters()}
    return planned


def _dense_pairs(model: nn.Module, described: Mapping[str, Mapping[str, Any]]) -> dict[str, Pair]:
    """The MLPs of `model`, by name, that are paired in the description and dense in the model."""
    paired = {name for name, entry in described.items() if entry["class"] == DynamicSparseMLP.__name__}
    pairs = {pair.name: pair for pair in find_pairs(model)} if paired else {}
    return {name: pair for name, pair in pairs.items() if name in paired}


def _matrices_of(layer: Any) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of every matrix of a dense layer that has a gated form, by the name of its gate."""
    if isinstance(layer, QRNN):
        filters: Any = layer.filters
        return {f"filters.{i}.gate": tuple(f.weight.shape) for i, f in enumerate(filters)}
    if isinstance(layer, (nn.RNNBase, nn.RNNCellBase)):
        return {f"gate_{n}": tuple(getattr(layer, f"weight_{n}").shape) for n in matrix_names(layer)}
    shape = tuple(layer.weight.shape)
    return {"gate": shape[::-1] if stores_transposed(layer) else shape}


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
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, OverflowError) as error:
        raise invalid(
            f"options of layer {name!r}", expected="those of a GateSpec", got=entry["options"], remedy="Save it again."
        ) from error


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
