"""`sparsify_`: gates for the layers of any model, in one call and in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from blockgate.convert.candidates import ALREADY_GATED, Candidate, find_candidates, reason_to_leave, refusal
from blockgate.convert.closeness import relative_difference, run_example
from blockgate.convert.forms import gated_forms
from blockgate.convert.pairs import Pair, find_pairs
from blockgate.convert.replace import Place, replace_layers
from blockgate.convert.report import LayerReport, SparsifyReport
from blockgate.errors import BlockgateError, InvalidInputError, invalid
from blockgate.find import check_patterns, first_match
from blockgate.gates import Gate
from blockgate.grid import check_size
from blockgate.schedule import warn_of_rounding
from blockgate.spec import GateSpec

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from blockgate.spec import GateOptions

__all__ = ["Advised", "after_conversion", "sparsify_"]

# Called with every model that was converted.
after_conversion: list[Callable[[nn.Module], None]] = []

# By name, since a build of torch may lack them.
PARALLEL_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel"}


class Advised(Protocol):
    """What `bg.advise` returns, as far as it matters here."""

    def options(self) -> Mapping[str, Mapping[str, Any] | None]:
        """What each layer gets by its name, None for those to leave dense."""


def sparsify_(
    model: nn.Module,
    advice: Advised | None = None,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    options: Mapping[str, Mapping[str, Any] | None] | None = None,
    example_input: Any = None,
    paired: int | None = None,
    **gate_options: Unpack[GateOptions],
) -> SparsifyReport:
    """Replaces the layers of `model` by gated ones, in place; weights and biases stay the same Parameter objects.

    nn.Linear, nn.LSTM, nn.GRU, their cells, `QRNN` and Hugging Face's Conv1D have a gated form. Left as they are by
    default: output heads (a linear layer whose own name is in `HEAD_NAMES`, or the last one if no layer has as many
    inputs as it has outputs), weights shared with another module, and layers with too few blocks to choose from.
    `filter_fn` replaces these three rules. Layers that can't be gated (subclasses, parametrized or pruned layers,
    layers with hooks, LSTMs with a projection, torch's MultiheadAttention) are left in any case. The report gives every
    reason. If anything is wrong, nothing is changed.

    Args:
        model: any module that contains such layers. Convert before you make the optimizer, since gates are new
            parameters, and before you wrap the model for parallel training.
        advice: what `bg.advise` returned for this model: it decides for every layer that `options` doesn't name.
        filter_fn: called with every layer that can be gated and that `options` doesn't leave out, and its name; it
            alone decides then.
        options: from name patterns to the options of the layers they match, such as {"encoder.*": {"sparsity": 0.9}},
            or to None, to leave them dense. The first pattern that matches the name of a layer, or of a module that
            contains it, counts; one that counts for no layer is an error. A layer named in full is gated whatever
            the three rules say.
        example_input: a tensor, a tuple of arguments or a dict of keyword arguments for `model`. If given, the model
            runs before and after, and the report says how far its output moved at sparsity 0.
        paired: hidden channels of a block, such as 32: MLPs of transformers then become `DynamicSparseMLP`, with one
            gate for their two or three layers, and whatever is wrong with one of these leaves them to the usual rules.
            Known are those of torch's transformers, of GPT-2, BERT, Llama and their relatives, and Linear, activation,
            Linear in an nn.Sequential, with GELU, ReLU or SiLU. Of their options those of the up projection count.
            None: every layer has gates of its own.
        gate_options: the options of `DynamicSparseLinear`: sparsity (0.5), block_size (256, 16), key_size, key_offset,
            gate_hidden, gate, normalise, select, backend.

    Returns:
        A report of every layer; print it for a table. A second call finds every layer gated and changes nothing.
    """
    # What torch.compile returned runs the module inside of it, and compiles again when that changes.
    model = getattr(model, "_orig_mod", model)
    candidates = _candidates_of(model)
    patterns = _checked_patterns(options, candidates)
    advised = {} if advice is None else _advised(advice, candidates)
    patterns |= {name: own for name, own in advised.items() if name not in patterns}
    common = GateSpec.of(None, gate_options)
    made: dict[Any, nn.Module] = {}
    entries: list[LayerReport] = []
    pairs = {} if paired is None else _pairs_of(model, candidates, patterns, filter_fn, check_size("paired", paired))
    for candidate in candidates:
        if pair := pairs.get(candidate.module):
            if candidate.module is pair.layers[0]:
                new = _gated_pair(pair, common, first_match(patterns, candidate.names), paired)
                made |= new
                entries.append(_entry_of_pair(pair, new))
            continue
        own = first_match(patterns, candidate.names)
        spec = GateSpec.of(common, (own[1] if own else None) or {})
        reason = _reason_to_skip(candidate, spec, own, filter_fn)
        if reason and own and own[0] in advised and own[0] not in (options or {}):
            reason = "left dense by the advice"
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
    gates = _gates_of(made)
    warn_of_rounding({gate: gate.target_sparsity for gate in gates}, stacklevel=3)
    if example_input is None or not made:
        replace_layers(model, made)
        _tell(model)
        return SparsifyReport(layers=tuple(entries))
    difference, ran = _replace_and_compare(model, made, example_input)
    _tell(model)
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


def _tell(model: nn.Module) -> None:
    for told in after_conversion:
        told(model)


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


def _advised(advice: Advised, candidates: list[Candidate]) -> Mapping[str, Mapping[str, Any] | None]:
    if not callable(getattr(advice, "options", None)):
        raise invalid("advice", expected="what bg.advise returns", got=type(advice).__name__, remedy="See bg.advise.")
    options = advice.options()
    known = {candidate.names[0] for candidate in candidates}
    if other := [name for name in options if name not in known]:
        raise invalid(
            "advice",
            expected="the advice for this model",
            got=f"layers it doesn't have: {', '.join(other[:5])}",
            remedy="Call bg.advise with this model.",
        )
    return options


def _reason_to_skip(
    candidate: Candidate,
    spec: GateSpec | None,
    own: tuple[str, Mapping[str, Any] | None] | None,
    filter_fn: Callable[[nn.Module, str], bool] | None,
) -> str:
    """Why this layer stays as it is, or ""; without a spec whatever its size. An error if it was asked for by name and
    can't be gated."""
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


def _pairs_of(
    model: nn.Module,
    candidates: list[Candidate],
    patterns: Mapping[str, Mapping[str, Any] | None],
    filter_fn: Callable[[nn.Module, str], bool] | None,
    block: int,
) -> dict[nn.Module, Pair]:
    """For every layer of an MLP whose layers may all be gated: that MLP."""
    free = {
        candidate.module
        for candidate in candidates
        if not _reason_to_skip(candidate, None, first_match(patterns, candidate.names), filter_fn)
    }
    pairs = [pair for pair in find_pairs(model) if free.issuperset(pair.layers) and pair.sizes[0] > block]
    return {layer: pair for pair in pairs for layer in pair.layers}


def _gated_pair(
    pair: Pair, common: GateSpec, own: tuple[str, Mapping[str, Any] | None] | None, block: int | None
) -> dict[nn.Module | Place, nn.Module]:
    options = {**((own[1] if own else None) or {}), "block_size": (block, pair.sizes[1])}
    try:
        return pair.make(GateSpec.of(common, options))
    except BlockgateError as error:
        raise InvalidInputError(f"layer {pair.name!r}: {error}") from error


def _entry_of_pair(pair: Pair, made: Mapping[Any, nn.Module]) -> LayerReport:
    gates = _gates_of(made)
    return LayerReport(
        name=pair.name,
        kind=pair.kind,
        converted=True,
        grids=tuple((gate.grid.out_blocks, gate.grid.in_blocks) for gate in gates),
        densities=tuple(gate.target_density for gate in gates),
        gate_parameters=sum(parameter.numel() for gate in gates for parameter in gate.parameters()),
        also=tuple(pair.names.values()),
    )


def _gates_of(made: Mapping[Any, nn.Module]) -> list[Gate]:
    return [module for layer in made.values() for module in layer.modules() if isinstance(module, Gate)]


def _entry(candidate: Candidate, reason: str, made: nn.Module | None) -> LayerReport:
    gates = [] if made is None else [module for module in made.modules() if isinstance(module, Gate)]
    return LayerReport(
        name=candidate.name,
        kind=candidate.kind,
        converted=made is not None,
        reason=reason,
        grids=tuple((gate.grid.out_blocks, gate.grid.in_blocks) for gate in gates),
        densities=tuple(gate.target_density for gate in gates),
        gate_parameters=sum(parameter.numel() for gate in gates for parameter in gate.parameters()),
        also=tuple(candidate.names[1:]),
    )


def _replace_and_compare(model: nn.Module, made: dict[Any, nn.Module], example: Any) -> tuple[float, set[nn.Module]]:
    """Replaces the layers; how far the output moves with all blocks open, and the layers whose gated form ran."""
    gates = _gates_of(made)
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
