"""Gated layers as a checkpoint describes them: class and options, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from blockgate.convert.candidates import find_candidates, refusal
from blockgate.convert.replace import gated_forms
from blockgate.errors import BlockgateError, InvalidInputError, invalid
from blockgate.gates import Gate, SoftmaxSumGate, TopKGate
from blockgate.gates.base import DEFAULT_KEY_SIZE
from blockgate.gates.topk import default_select

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["describe_layers", "gate_prefixes", "rebuild_layers"]


def describe_layers(model: nn.Module) -> dict[str, dict[str, Any]]:
    """For the first name of every gated layer: its class and the options that make it of a dense one."""
    forms = set(gated_forms().values())
    return {
        candidate.name: {"class": type(candidate.module).__name__, "options": _options_of(candidate.module)}
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
                made[layer] = form.from_dense(layer, **entry["options"])
            except (BlockgateError, TypeError) as error:
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
    saved, here = ({**o, "sparsity": None} for o in (entry["options"], _options_of(layer)))
    if saved != here:
        raise invalid(
            f"layer {name!r}",
            expected=f"the options of the checkpoint, {saved}",
            got=here,
            remedy="Pass a model like the one that was saved, or the dense one.",
        )


def _options_of(layer: nn.Module) -> dict[str, Any]:
    """The options that make this layer of its dense form; which backend computes is left to where it runs."""
    gates = [module for module in layer.modules() if isinstance(module, Gate)]
    parts = zip(map(_own_options, gates), _key_options(gates), _select_options(gates), strict=True)
    options = [{**own, **key, **select} for own, key, select in parts]
    if any(other != options[0] for other in options):
        raise invalid(
            type(layer).__name__,
            expected="the same options for all gates of one layer",
            got=options,
            remedy="Save the state_dict, and build the model in code.",
        )
    return {**options[0], "sparsity": _first_sparsity(gates)}


def _own_options(gate: Gate) -> dict[str, Any]:
    options = {
        "block_size": list(gate.grid.block),
        "key_offset": gate.key_offset,
        "gate_hidden": gate.hidden_size or None,
        "gate": gate.kind,
    }
    if isinstance(gate, TopKGate):
        options["normalise"] = gate.normalise
    return options


def _select_options(gates: list[Gate]) -> list[dict[str, str]]:
    """The option `select` of each gate: left out where every grid of the layer has its own default."""
    chosen = [(gate.select, default_select(gate.grid)) for gate in gates if isinstance(gate, TopKGate)]
    if len({select for select, _ in chosen}) > 1 and all(select == default for select, default in chosen):
        return [{}] * len(gates)
    return [{"select": gate.select} if isinstance(gate, TopKGate) else {} for gate in gates]


def _key_options(gates: list[Gate]) -> list[dict[str, int | None]]:
    """The option `key_size` that gave each gate its key: left out, None or a number, as all of them together tell."""
    rests = [gate.grid.in_features - gate.key_offset for gate in gates]
    sizes = [gate.key_size for gate in gates]
    if len(set(sizes)) > 1 and sizes == rests:
        return [{"key_size": None}] * len(gates)
    if len(set(sizes)) > 1 and sizes == [min(DEFAULT_KEY_SIZE, rest) for rest in rests]:
        return [{}] * len(gates)
    return [{"key_size": size} for size in sizes]


def _first_sparsity(gates: list[Gate]) -> float:
    """The sparsity to make these gates with. Heads are counted then, and may be more than are used now."""
    heads = [(gate.heads, gate.grid.num_blocks) for gate in gates if isinstance(gate, SoftmaxSumGate)]
    if not heads:
        return gates[0].target_sparsity
    # The densities that open_blocks rounds to the counts of all gates; the middle is safe from rounding.
    low = max((count - 0.5) / blocks if count > 1 else 0.0 for count, blocks in heads)
    high = min((count + 0.5) / blocks if count < blocks else 1.0 for count, blocks in heads)
    return 1 - (low + high) / 2
