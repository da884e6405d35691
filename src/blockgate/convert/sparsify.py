"""`sparsify_`: gates for the layers of any model, in one call and in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from blockgate.convert.candidates import ALREADY_GATED, Candidate, find_candidates, reason_to_leave, refusal
from blockgate.convert.closeness import relative_difference, run_example
from blockgate.convert.forms import gated_forms
from blockgate.convert.replace import replace_layers
from blockgate.convert.report import LayerReport, SparsifyReport
from blockgate.errors import BlockgateError, InvalidInputError, invalid
from blockgate.find import check_patterns, first_match
from blockgate.gates import Gate
from blockgate.spec import GateSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Unpack

    from blockgate.spec import GateOptions

__all__ = ["sparsify_"]

# By name, since a build of torch may lack them.
PARALLEL_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel"}


def sparsify_(
    model: nn.Module,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    options: Mapping[str, Mapping[str, Any] | None] | None = None,
    example_input: Any = None,
    **gate_options: Unpack[GateOptions],
) -> SparsifyReport:
    """Replaces the layers of `model` by gated ones, in place; weights and biases stay the same Parameter objects.

    nn.Linear, nn.LSTM, nn.LSTMCell, `QRNN` and Hugging Face's Conv1D have a gated form. Left as they are by default:
    output heads (a linear layer whose own name is in `HEAD_NAMES`, or the last one if no layer has as many inputs as it
    has outputs), weights shared with another module, and layers with fewer than two rows or columns of blocks.
    `filter_fn` replaces these three rules. Layers that can't be gated (subclasses, parametrized or pruned layers,
    layers with hooks, bidirectional LSTMs, torch's MultiheadAttention) are left in any case. The report gives every
    reason. If anything is wrong, nothing is changed.

    Args:
        model: any module that contains such layers. Convert before you make the optimizer, since gates are new
            parameters, and before you wrap the model for parallel training.
        filter_fn: called with every layer that can be gated and that `options` doesn't leave out, and its name; it
            alone decides then.
        options: from name patterns to the options of the layers they match, such as {"encoder.*": {"sparsity": 0.9}},
            or to None, to leave them dense. The first pattern that matches the name of a layer, or of a module that
            contains it, counts; one that counts for no layer is an error. A layer named in full is gated whatever
            the three rules say.
        example_input: a tensor, a tuple of arguments or a dict of keyword arguments for `model`. If given, the model
            runs before and after, and the report says how far its output moved at sparsity 0.
        gate_options: the options of `DynamicSparseLinear`: sparsity (0.5), block_size (256, 16), key_size, key_offset,
            gate_hidden, gate, normalise, select, backend.

    Returns:
        A report of every layer; print it for a table. A second call finds every layer gated and changes nothing.
    """
    # What torch.compile returned runs the module inside of it, and compiles again when that changes.
    model = getattr(model, "_orig_mod", model)
    candidates = _candidates_of(model)
    patterns = _checked_patterns(options, candidates)
    common = GateSpec.of(None, gate_options)
    made: dict[nn.Module, nn.Module] = {}
    entries: list[LayerReport] = []
    for candidate in candidates:
        own = first_match(patterns, candidate.names)
        spec = GateSpec.of(common, (own[1] if own else None) or {})
        reason = _reason_to_skip(candidate, spec, own, filter_fn)
        if not reason:
            made[candidate.module] = _gated(candidate, spec)
        entries.append(_entry(candidate, reason, made.get(candidate.module)))
    if not made and all(entry.reason != ALREADY_GATED for entry in entries):
        reasons = "\n".join(f"  {entry.name} ({entry.kind}): {entry.reason}" for entry in entries)
        raise invalid(
            "sparsify_",
            expected="a model with layers to gate",
            got=type(model).__name__,
            remedy=f"Choose layers by filter_fn or options, or a smaller block_size.\n{reasons}".rstrip(),
        )
    if example_input is None or not made:
        replace_layers(model, made)
        return SparsifyReport(layers=tuple(entries))
    difference, ran = _replace_and_compare(model, made, example_input)
    not_run = tuple(c.name for c in candidates if c.module in made and c.module not in ran)
    return SparsifyReport(layers=tuple(entries), relative_difference=difference, not_run=not_run)


def _candidates_of(model: nn.Module) -> list[Candidate]:
    if not isinstance(model, nn.Module):
        raise invalid("sparsify_", expected="an nn.Module", got=type(model).__name__, remedy="Pass a model.")
    if form := gated_forms().get(type(model)):
        raise invalid(
            "sparsify_",
            expected="a model that contains layers, to replace them in place",
            got=type(model).__name__,
            remedy=f"A single layer can't replace itself: use {form.__name__}.from_dense(layer).",
        )
    if wrapper := next((name for name in map(_type_name, model.modules()) if name in PARALLEL_WRAPPERS), None):
        raise invalid(
            "sparsify_",
            expected="a model that is not yet wrapped",
            got=wrapper,
            remedy="It would not know the new gates: convert the model first, then wrap it.",
        )
    return find_candidates(model)


def _type_name(module: nn.Module) -> str:
    return type(module).__name__


def _checked_patterns(
    options: Mapping[str, Mapping[str, Any] | None] | None, candidates: list[Candidate]
) -> dict[str, Mapping[str, Any] | None]:
    if options is not None and not isinstance(options, Mapping):
        raise invalid(
            "options",
            expected="a mapping from name patterns to dicts of options or None",
            got=type(options).__name__,
            remedy="Options of all layers are arguments of their own.",
        )
    patterns = dict(options or {})
    for pattern, own in patterns.items():
        if own is not None and not isinstance(own, Mapping):
            raise invalid(
                f"options[{pattern!r}]", expected="a dict of options, or None", got=own, remedy="None skips layers."
            )
        try:
            GateSpec.of(None, own or {})
        except BlockgateError as error:
            raise InvalidInputError(f"options[{pattern!r}]: {error}") from error
    check_patterns(patterns, [candidate.names for candidate in candidates])
    return patterns


def _reason_to_skip(
    candidate: Candidate,
    spec: GateSpec,
    own: tuple[str, Mapping[str, Any] | None] | None,
    filter_fn: Callable[[nn.Module, str], bool] | None,
) -> str:
    """Why this layer stays as it is, or ""; an error if it was asked for by name and can't be gated."""
    named = own is not None and own[1] is not None and own[0] in candidate.names
    if reason := refusal(candidate.module):
        if named and reason != ALREADY_GATED:
            raise invalid(
                f"layer {candidate.name!r}", expected="a layer that can be gated", got=reason, remedy="Leave it out."
            )
        return reason
    if own is not None and own[1] is None:
        return f"left out by options[{own[0]!r}]"
    if filter_fn is not None:
        return "" if any(filter_fn(candidate.module, name) for name in candidate.names) else "left out by filter_fn"
    return "" if named else reason_to_leave(candidate, spec)


def _gated(candidate: Candidate, spec: GateSpec) -> nn.Module:
    try:
        made: nn.Module = gated_forms()[type(candidate.module)].from_dense(candidate.module, spec=spec)
    except BlockgateError as error:
        raise InvalidInputError(f"layer {candidate.name!r}: {error}") from error
    return made


def _entry(candidate: Candidate, reason: str, made: nn.Module | None) -> LayerReport:
    gates = [] if made is None else [module for module in made.modules() if isinstance(module, Gate)]
    return LayerReport(
        name=candidate.name,
        kind=candidate.kind,
        converted=made is not None,
        reason=reason,
        grids=tuple((gate.grid.out_blocks, gate.grid.in_blocks) for gate in gates),
        gate_parameters=sum(parameter.numel() for gate in gates for parameter in gate.parameters()),
        also=tuple(candidate.names[1:]),
    )


def _replace_and_compare(
    model: nn.Module, made: dict[nn.Module, nn.Module], example: Any
) -> tuple[float, set[nn.Module]]:
    """Replaces the layers; how far the output moves with all blocks open, and the layers whose gated form ran."""
    gates = [module for layer in made.values() for module in layer.modules() if isinstance(module, Gate)]
    targets = [gate.target_sparsity for gate in gates]
    before = run_example(model, example)
    undo = replace_layers(model, made)
    ran: set[nn.Module] = set()
    hooks = [gated.register_forward_hook(lambda *_, dense=dense: ran.add(dense)) for dense, gated in made.items()]
    try:
        for gate in gates:
            gate.target_sparsity = 0.0
        difference = relative_difference(run_example(model, example), before)
    except BaseException:
        undo()
        raise
    finally:
        for hook in hooks:
            hook.remove()
        for gate, target in zip(gates, targets, strict=True):
            gate.target_sparsity = target
        for layer in made.values():
            # A layer in training gives the memory back that its run in eval took.
            layer.train(layer.training)
    return difference, ran
