"""`load_pretrained`: rebuilds the gated layers of a checkpoint around a model, and fills in the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from blockgate.checkpoint.files import fingerprint, read_checkpoint
from blockgate.checkpoint.layers import gate_prefixes, planned_gates, rebuild_layers
from blockgate.checkpoint.registry import build_model
from blockgate.convert.replace import replace_layers
from blockgate.errors import BlockgateError, invalid
from blockgate.find import holds_shards, unwrapped
from blockgate.gates import Gate

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

__all__ = ["load_pretrained"]


def load_pretrained(
    directory: str | os.PathLike[str],
    model: nn.Module | Callable[[], nn.Module] | None = None,
    *,
    strict: bool = True,
) -> nn.Module:
    """The model of a checkpoint that `save_pretrained` wrote, with its gated layers, sparsities, types and ties.

    All is checked before the model is touched: on an error it is as it was.

    Args:
        directory: the folder of the checkpoint.
        model: the dense model, or one with the same gated layers, which is then changed in place; or a function that
            makes it. None for a checkpoint that names its constructor. For a checkpoint of gates alone it must be the
            dense model with its weights.
        strict: whether gates alone may only be put on the very weights they were saved beside.

    Returns:
        The model; for a checkpoint of a single gated layer and a dense one as `model`, a new layer with its parameters.
    """
    config, tensors = read_checkpoint(directory)
    saved = _untied(tensors, config["ties"])
    built = _model_for(config, model)
    dense = _without_gates(built)
    if config["gates_only"]:
        _check_dense(dense, config, strict)
    _check_shapes(dense, saved)
    _check_planned(planned_gates(built, config["layers"]), saved)
    made = rebuild_layers(built, config["layers"])
    built = made.get(built, built)
    undo = replace_layers(built, made)
    try:
        state = _expected(built, gates_only=config["gates_only"])
        saved = _newer_values(built) | saved
        _check_keys(state, saved)
        _check_shapes(state, saved)
        _check_ties(state, config["ties"])
        _check_kept(built, saved)
        _check_memory(built, state)
    except BaseException:
        undo()
        raise
    _fill(built, state, saved, keep_types=config["gates_only"])
    for key, kept in config["ties"].items():
        _tie(built, key, kept)
    return built


def _model_for(config: Mapping[str, Any], model: object) -> nn.Module:
    if model is None and config["constructor"] is None:
        raise invalid(
            "model",
            expected="the dense model, or a function that makes it: the checkpoint names none",
            got=None,
            remedy="Pass load_pretrained(directory, model).",
        )
    if model is None:
        try:
            made: object = build_model(config["constructor"], config["constructor_options"])
        except (TypeError, LookupError, ArithmeticError) as error:
            raise invalid(
                "constructor_options",
                expected=f"options of the registered model {config['constructor']!r}",
                got=f"{config['constructor_options']!r:.200} ({error})",
                remedy="Load a folder that save_pretrained wrote, unchanged.",
            ) from error
    else:
        made = model if isinstance(model, nn.Module) or not callable(model) else model()
    if not isinstance(made, nn.Module):
        raise invalid(
            "model", expected="an nn.Module or a function that makes one", got=type(made).__name__, remedy="Pass that."
        )
    made = unwrapped(made)
    if holds_shards(made):
        raise invalid(
            "model",
            expected="a model whose tensors are whole",
            got="one that fully_shard has spread over processes",
            remedy="Load first and shard then; torch.distributed.checkpoint loads into sharded models.",
        )
    return made


def _untied(tensors: Mapping[str, Tensor], ties: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors of a checkpoint under all their names."""
    for key, kept in ties.items():
        if kept not in tensors or key in tensors:
            raise invalid(
                "ties",
                expected="names without a tensor that stand for one in the file",
                got={key: kept},
                remedy="Save it again.",
            )
    return {**tensors, **{key: tensors[kept] for key, kept in ties.items()}}


def _without_gates(model: nn.Module) -> dict[str, Tensor]:
    prefixes = gate_prefixes(model)
    state = {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}
    return {key: value for key, value in state.items() if not key.startswith(prefixes)}


def _check_dense(dense: Mapping[str, Tensor], config: Mapping[str, Any], strict: bool) -> None:
    """Raises unless these are the weights that the gates were saved beside."""
    if any(tensor.is_meta for tensor in dense.values()):
        raise invalid("model", expected="the dense model with its weights", got="meta tensors", remedy="Load it first.")
    if strict and fingerprint(dense) != config["dense_sha256"]:
        raise invalid(
            "model",
            expected="the weights beside which the gates were saved",
            got="others, or another type",
            remedy="Load the dense model that the gates were trained on, or pass strict=False.",
        )


def _expected(model: nn.Module, *, gates_only: bool) -> dict[str, Any]:
    """What of the model's state a checkpoint must fill, as the objects that the model holds."""
    prefixes = gate_prefixes(model)
    state = model.state_dict(keep_vars=True)
    return {key: value for key, value in state.items() if not gates_only or key.startswith(prefixes)}


def _newer_values(model: nn.Module) -> dict[str, Tensor]:
    """What gates keep beside parameters and a sparsity: files of version 0.1 hold none of it."""
    gates = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, Gate)]
    values = {f"{name}.{kept}": value for name, gate in gates for kept, value in gate.kept_values().items()}
    return {key: value for key, value in values.items() if not key.endswith(".sparsity")}


def _check_keys(state: Mapping[str, Any], saved: Mapping[str, Tensor]) -> None:
    faults = [f"{key}: not in the checkpoint" for key in state if key not in saved]
    _raise_faults(faults + [f"{key}: not in the model" for key in saved if key not in state])


def _check_planned(planned: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Raises unless the file has these parameters: nothing is to be made that it can't fill."""
    _raise_faults([f"{key}: not in the checkpoint" for key in planned if key not in saved])
    _check_shapes(planned, saved)


def _check_shapes(state: Mapping[str, Any], saved: Mapping[str, Tensor]) -> None:
    _raise_faults([
        f"{key}: {tuple(saved[key].shape)} in the checkpoint, {tuple(tensor.shape)} in the model"
        for key, tensor in state.items()
        if key in saved and saved[key].shape != tensor.shape
    ])


def _raise_faults(faults: list[str]) -> None:
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise invalid(
            "checkpoint", expected="the tensors of this model", got=shown, remedy="Pass a model like the saved one."
        )


def _check_ties(state: Mapping[str, Tensor], ties: Mapping[str, str]) -> None:
    """Raises if the model ties what the checkpoint has two values for: the later one would overwrite the other."""
    first: dict[int, str] = {}
    for key, tensor in state.items():
        other = first.setdefault(id(tensor), key)
        if ties.get(key, key) != ties.get(other, other):
            raise invalid(
                f"parameters {other!r} and {key!r}",
                expected="two, as in the checkpoint",
                got="one that the model shares",
                remedy="Pass a model that ties what the saved one tied.",
            )


def _check_kept(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Raises if a gate can't take a sparsity, or another value beside its parameters; leaves the gates as they are."""
    for name, module in model.named_modules(remove_duplicate=False):
        before = module.kept_values() if isinstance(module, Gate) else {}
        for kept, value in before.items():
            key = f"{name}.{kept}"
            if key not in saved:
                continue
            try:
                module.take_kept(kept, saved[key])
            except (BlockgateError, ValueError, RuntimeError) as error:
                raise invalid(
                    key, expected=f"a {kept} of this gate", got=str(error), remedy="Save it again."
                ) from error
            finally:
                module.take_kept(kept, value)


def _check_memory(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Raises if something on the meta device would stay there, because no checkpoint holds it."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in state:
            raise invalid(
                f"buffer {name!r}",
                expected="values, which checkpoints don't hold",
                got="the meta device",
                remedy="Build the model on a real device.",
            )


def _fill(model: nn.Module, state: Mapping[str, Tensor], saved: dict[str, Tensor], *, keep_types: bool) -> None:
    """Writes the weights into the model's own tensors, which take the types of the checkpoint; meta ones are made."""
    on_meta = any(isinstance(tensor, Tensor) and tensor.is_meta for tensor in state.values())
    if not keep_types and not on_meta:
        for key, tensor in state.items():
            if tensor.dtype != saved[key].dtype:
                tensor.data = tensor.data.to(saved[key].dtype)
    model.load_state_dict(saved, strict=not keep_types, assign=on_meta)


def _tie(model: nn.Module, key: str, kept: str) -> None:
    """Makes the parameter or buffer `key` the same object as `kept`."""
    owner, _, name = key.rpartition(".")
    source, _, kept_name = kept.rpartition(".")
    target, origin = model.get_submodule(owner), model.get_submodule(source)
    pairs: list[tuple[Any, Any]] = [(target._parameters, origin._parameters), (target._buffers, origin._buffers)]
    for place, known in pairs:
        if name in place and kept_name in known:
            place[name] = known[kept_name]
