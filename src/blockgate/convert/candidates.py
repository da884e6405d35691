"""Which layers of a model can be gated, which should be, and the reasons for the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from blockgate.convert.forms import gated_classes, gated_forms
from blockgate.find import holds_shards, outermost, own_class
from blockgate.gates import Gate
from blockgate.layers.conv1d import stores_transposed
from blockgate.runtime.block_linear import BlockLinear
from blockgate.runtime.packed import PackedLinear
from blockgate.runtime.packed_columns import PackedColumnLinear
from blockgate.runtime.packed_paired import PackedPairedMLP
from blockgate.runtime.packed_recurrent import PackedRecurrence
from blockgate.runtime.recurrent import has_projection

if TYPE_CHECKING:
    from blockgate.grid import BlockGrid
    from blockgate.spec import GateSpec

__all__ = ["ALREADY_GATED", "HEAD_NAMES", "Candidate", "find_candidates", "reason_to_leave", "refusal"]

ALREADY_GATED = "already gated"

# What output heads are called, as the last part of their name.
HEAD_NAMES = frozenset({
    "classifier",
    "decoder",
    "embed_out",
    "fc_out",
    "head",
    "lm_head",
    "logits",
    "output_projection",
    "qa_outputs",
    "score",
})

PACKED = (PackedLinear, PackedColumnLinear, PackedRecurrence, PackedPairedMLP)

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A layer with weight matrices, which may or may not be gated.

    Args:
        module: the layer.
        names: its names in the model; a layer that is used in several places has several.
        shared_with: name of another module that holds one of its weights too, or "".
        is_last_linear: whether no linear layer comes after it, in the order of definition.
        is_read: whether some layer of the model takes as many inputs as this one has outputs.
    """

    module: nn.Module
    names: list[str]
    shared_with: str
    is_last_linear: bool
    is_read: bool

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def kind(self) -> str:
        """The type of the layer, as reports show it."""
        return type(self.module).__name__

    def grids(self, spec: GateSpec) -> list[BlockGrid]:
        """The block grid that each of its weight matrices would have."""
        return [spec.grid(out, inputs) for out, inputs in _matrix_shapes(self.module)]


def find_candidates(model: nn.Module) -> list[Candidate]:
    """Every layer of `model` with weight matrices, in the order of definition; layers inside of one are part of it."""
    found: dict[nn.Module, list[str]] = {}
    forms = gated_forms()
    kinds = (
        *forms,
        *gated_classes(),
        *PACKED,
        nn.MultiheadAttention,
        nn.RNNBase,
        nn.RNNCellBase,
    )
    for name, module in outermost(model, kinds):
        found.setdefault(module, []).append(name)
    read = {inputs for module in found for _, inputs in _matrix_shapes(module)}
    last = next((m for m in reversed(found) if isinstance(m, (nn.Linear, BlockLinear)) or stores_transposed(m)), None)
    owners = _owners(model)
    return [
        Candidate(
            module,
            names,
            shared_with=_shared_with(module, owners),
            is_last_linear=module is last,
            is_read=any(out in read for out, _ in _matrix_shapes(module)),
        )
        for module, names in found.items()
    ]


def refusal(module: nn.Module) -> str:
    """Why a layer can't be gated, or ""."""
    forms = gated_forms()
    if isinstance(module, gated_classes()):
        return ALREADY_GATED
    if isinstance(module, PACKED):
        return "packed, for inference only"
    if isinstance(module, nn.MultiheadAttention):
        return "torch's attention reads the weights of its projections itself, around any gate"
    if has_projection(module):
        return "LSTMs with a projection have no gated form"
    if any(parametrize.is_parametrized(inner) for inner in module.modules()):
        return "parametrized: remove its parametrizations first"
    if any(isinstance(p, UninitializedParameter) for p in module.parameters()):
        return "lazy: run a batch through the model first"
    if own_class(module) not in forms:
        base = next((form.__name__ for form in forms if isinstance(module, form)), None)
        return f"a subclass of {base}, which may compute something else" if base else "has no gated form"
    if holds_shards(module):
        return "sharded: gate the model first, and call fully_shard then"
    if any(getattr(inner, hooks, None) for inner in module.modules() for hooks in _HOOKS):
        return "has hooks, as pruned layers have: remove them first"
    if "forward" in vars(module):
        return "its forward was replaced"
    if not _matrix_shapes(module):
        return "its weight is no parameter of its own"
    for parameter in module.parameters():
        if type(parameter) is not nn.Parameter or not parameter.is_floating_point():
            return f"its weight is a {type(parameter).__name__} of {parameter.dtype}".replace("torch.", "")
    return ""


def reason_to_leave(candidate: Candidate, spec: GateSpec | None) -> str:
    """Why a layer that can be gated is better left dense, or ""; without a spec whatever its size."""
    own_names = {name.rpartition(".")[2] for name in candidate.names}
    if heads := own_names & HEAD_NAMES:
        return f"output head, by its name {min(heads)!r}"
    if candidate.is_last_linear and not candidate.is_read:
        return "output head: the last linear layer, whose outputs no layer reads"
    if candidate.shared_with:
        return f"its weight is shared with {candidate.shared_with!r}"
    if spec is None:
        return ""
    grids = candidate.grids(spec)
    # Of single columns one row of blocks is enough: they are chosen by the inputs, one by one.
    if all(grid.in_blocks < 2 or (grid.out_blocks < 2 and grid.block[1] > 1) for grid in grids):
        sizes = ", ".join(f"{grid.out_blocks}x{grid.in_blocks}" for grid in grids)
        return f"too small to pay: {sizes} blocks"
    return ""


def _matrix_shapes(module: nn.Module) -> list[tuple[int, int]]:
    """(out, in) of every weight matrix of a layer, its gates left out."""
    shapes = [(p.shape[0], p.shape[1]) for p in _matrices(module)]
    return [(out, inputs) for inputs, out in shapes] if stores_transposed(module) else shapes


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    held = [p for inner in module.modules() if not isinstance(inner, Gate) for p in inner._parameters.values()]
    return [p for p in held if p is not None and not isinstance(p, UninitializedParameter) and p.dim() == 2]


def _owners(model: nn.Module) -> dict[int, list[tuple[str, nn.Module]]]:
    """For the id of every parameter: the modules that hold it, by name."""
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((name, module))
    return owners


def _shared_with(module: nn.Module, owners: dict[int, list[tuple[str, nn.Module]]]) -> str:
    """The name of a module outside of `module` that holds one of its weight matrices, or ""."""
    inside = set(module.modules())
    for matrix in _matrices(module):
        for name, owner in owners[id(matrix)]:
            if owner not in inside:
                return name
    return ""
