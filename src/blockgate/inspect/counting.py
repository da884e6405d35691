"""Who holds which parameters, and how many multiply-adds a row costs: what `summary` shows, and the study counts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockgate.find import gate_label
from blockgate.gates import Gate
from blockgate.inspect.record import GateRecord
from blockgate.runtime.packed import PackedBlocks, PackedLinear
from blockgate.runtime.packed_columns import PackedColumnLinear
from blockgate.runtime.packed_paired import PackedPairedLinear, PackedPairedMLP
from blockgate.runtime.paired import PairedMLP, RunnableMLP

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from blockgate.inspect.statistics import GateStatistics

__all__ = ["LayerSummary", "count_layers", "gated_size", "matrices_of"]

# Layers without gates whose multiply-adds are known. An embedding has none: it looks rows up.
PLAIN = (nn.Linear, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.Embedding, PackedLinear)

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSummary:
    """One gated matrix or plain layer. MACs and bytes are for one row of its input.

    Attributes:
        name: of the layer in the model.
        kind: its type.
        parameters: its own, without the gate's. What it shares with a layer before it counts there.
        gate_parameters: those of its gate.
        blocks: how many blocks its gate has to decide on; 0 without one.
        macs_dense: multiply-adds with every block open and no gate.
        macs_now: multiply-adds of the open blocks and the gate, at measured density where there is one.
        gate_macs: those of the gate.
        bytes_dense: what the dense weights would take in float32.
        bytes_now: what is read of weights and gate, in the types they are stored in.
        target_density: of its blocks; None without a gate.
        measured_density: the same, counted on the example input; None if no row came by.
        rows: how many rows of the example input it saw; None without an example.
    """

    name: str
    kind: str
    parameters: int
    gate_parameters: int = 0
    blocks: int = 0
    macs_dense: int = 0
    macs_now: float = 0.0
    gate_macs: int = 0
    bytes_dense: int = 0
    bytes_now: float = 0.0
    target_density: float | None = None
    measured_density: float | None = None
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class _Found:
    """A gate or a plain layer, where it is and who holds it."""

    path: str
    module: nn.Module
    owner: nn.Module


def count_layers(
    model: nn.Module, example: Any | None = None, densities: Mapping[str, float] | None = None
) -> tuple[list[LayerSummary], list[str]]:
    """One line for each gated matrix and plain layer, one for the other parameters, and the types that hold those.

    Args:
        model: any module.
        example: what to call it with, to measure densities; None for none.
        densities: measured before, by the names of gated matrices; the target counts where there is none.
    """
    found = list(_find(model, "", model, set()))
    rows, record = (None, None) if example is None else _run(model, found, example)
    claimed: set[nn.Parameter] = set()
    lines = [
        _gated_line(f, f.module, claimed, record, densities or {})
        if isinstance(f.module, Gate)
        else _plain_line(f, claimed, None if rows is None else rows.get(f.module, 0))
        for f in found
    ]
    holders = {
        type(module).__name__
        for module in model.modules()
        for p in module.parameters(recurse=False)
        if p not in claimed
    }
    other = _claim(model.parameters(), claimed)
    if other:
        lines.append(LayerSummary(name="other", kind="", parameters=other, rows=None if rows is None else 0))
    return lines, sorted(holders)


def _find(module: nn.Module, path: str, owner: nn.Module, seen: set[nn.Module]) -> Iterator[_Found]:
    """Gates and plain layers, each once, in the order of the model. Plain layers are not searched further."""
    if module in seen:
        return
    seen.add(module)
    if isinstance(module, PackedPairedLinear):
        # Its MLP, which computes with it, counts it.
        return
    if isinstance(module, Gate) or (isinstance(module, PLAIN) and not _has_gate(module)):
        yield _Found(path, module, owner)
        return
    for name, child in module.named_children():
        yield from _find(child, f"{path}.{name}" if path else name, module, seen)


def _has_gate(module: nn.Module) -> bool:
    return any(isinstance(part, Gate) for part in module.modules())


def _claim(parameters: Iterable[nn.Parameter], claimed: set[nn.Parameter]) -> int:
    """How many parameters these are, without those that another line has already; now this line has them."""
    fresh = set(parameters) - claimed
    claimed |= fresh
    return sum(p.numel() for p in fresh)


def _gated_line(
    found: _Found,
    gate: Gate,
    claimed: set[nn.Parameter],
    record: GateRecord | None,
    densities: Mapping[str, float],
) -> LayerSummary:
    grid = gate.grid
    label = gate_label(found.path)
    weight, packed = _gated_weight(found)
    size = gated_size(found.owner, gate)
    gate_macs = gate.count_macs()
    statistics = None if record is None else record.gates[label]
    open_macs = densities.get(label, gate.target_density) * size
    if statistics is not None and statistics.rows:
        # All matrices of a paired MLP have as much in each hidden block as the one of the gate's grid, or a multiple.
        open_macs = _mean_open_area(statistics) * size / (grid.out_features * grid.in_features)
    stored = packed if packed is not None else next(iter((*weight, *gate.parameters())))
    read = next(iter((*gate.parameters(), *gate.buffers())))
    return LayerSummary(
        name=label,
        kind=type(found.owner).__name__,
        parameters=_claim(weight, claimed) + (size if packed is not None else 0),
        gate_parameters=_claim(gate.parameters(), claimed),
        blocks=grid.num_blocks,
        macs_dense=size,
        macs_now=open_macs + gate_macs,
        gate_macs=gate_macs,
        bytes_dense=size * FLOAT32_BYTES,
        bytes_now=open_macs * stored.element_size() + gate_macs * read.element_size(),
        target_density=gate.target_density,
        measured_density=densities.get(label) if statistics is None else statistics.measured_density,
        rows=None if statistics is None else statistics.rows,
    )


def gated_size(owner: nn.Module, gate: Gate) -> int:
    """Weights that a gate of `owner` decides on."""
    return owner.macs_dense if isinstance(owner, PairedMLP) else gate.grid.out_features * gate.grid.in_features


def _gated_weight(found: _Found) -> tuple[list[nn.Parameter], Tensor | None]:
    """Weight and bias that a gate's blocks belong to, and the packed weight where that is what the layer holds.

    `gate` goes with `weight`, `gate_ih_l0` with `weight_ih_l0`.
    """
    suffix = found.path.rpartition(".")[2].removeprefix("gate")
    names = {f"weight{suffix}", f"bias{suffix}"}
    weight = [
        p for name, p in found.owner.named_parameters() if name.removeprefix("parametrizations.").split(".")[0] in names
    ]
    if isinstance(found.owner, RunnableMLP):
        return [p for part in found.owner.parts() for p in part.parameters()], None
    if isinstance(found.owner, PackedPairedMLP):
        parts = [*found.owner.named_parts().values()]
        return [p for part in parts for p in part.parameters()], parts[0].packed.blocks
    if isinstance(found.owner, PackedColumnLinear):
        return weight, found.owner.columns
    packed = getattr(found.owner, f"packed{suffix}", None)
    return weight, packed.blocks if isinstance(packed, PackedBlocks) else None


def _mean_open_area(statistics: GateStatistics) -> float:
    """Weights in open blocks, averaged over rows; blocks at the edges may be smaller."""
    grid = statistics.grid
    heights = torch.tensor([
        min(grid.block[0], grid.out_features - i) for i in range(0, grid.out_features, grid.block[0])
    ])
    widths = torch.tensor([min(grid.block[1], grid.in_features - j) for j in range(0, grid.in_features, grid.block[1])])
    area = torch.outer(heights, widths).flatten()
    return int((statistics.open_counts * area).sum()) / statistics.rows


def _plain_line(found: _Found, claimed: set[nn.Parameter], rows: int | None) -> LayerSummary:
    layer = found.module
    weights = list(matrices_of(layer))
    packed = layer.grid.out_features * layer.grid.in_features if isinstance(layer, PackedLinear) else 0
    macs = packed or sum(w.numel() for w in weights)
    return LayerSummary(
        name=found.path or "model",
        kind=type(layer).__name__,
        parameters=_claim(layer.parameters(), claimed) + packed,
        macs_dense=macs,
        macs_now=macs,
        bytes_dense=macs * FLOAT32_BYTES,
        bytes_now=macs * (weights[0].element_size() if weights else 0),
        rows=rows,
    )


def matrices_of(layer: nn.Module) -> Iterator[Tensor]:
    """The weights that every row of a plain layer's input is multiplied by."""
    if isinstance(layer, nn.RNNBase):
        yield from (w for weights in layer.all_weights for w in weights if w.dim() == 2)
    elif isinstance(layer, (nn.RNNCellBase, nn.MultiheadAttention)):
        yield from (w for w in layer.parameters() if w.dim() == 2)
    elif isinstance(layer, PackedLinear):
        yield layer.packed.blocks
    elif isinstance(layer, nn.Linear):
        yield layer.weight


def _width(layer: nn.Module) -> int:
    """Size of the last dimension of a plain layer's output."""
    if isinstance(layer, nn.RNNBase):
        return (layer.proj_size or layer.hidden_size) * (1 + layer.bidirectional)
    if isinstance(layer, nn.RNNCellBase):
        return layer.hidden_size
    if isinstance(layer, nn.MultiheadAttention):
        return int(layer.embed_dim)
    if isinstance(layer, nn.Embedding):
        return layer.embedding_dim
    assert isinstance(layer, (nn.Linear, PackedLinear))
    return layer.out_features


def _run(model: nn.Module, found: list[_Found], example: Any) -> tuple[dict[nn.Module, int], GateRecord]:
    """Calls the model once: how many rows each plain layer saw, and what the gates decided."""
    rows: dict[nn.Module, int] = {}

    def count_rows(layer: nn.Module, _: Any, output: Any) -> None:
        first = output[0] if type(output) is tuple else output
        # `.data` is the tensor itself, or that of a PackedSequence.
        rows[layer] = rows.get(layer, 0) + first.data.numel() // _width(layer)

    gates = {gate_label(f.path): f.module for f in found if isinstance(f.module, Gate)}
    with ExitStack() as stack:
        for f in found:
            if not isinstance(f.module, Gate):
                stack.callback(f.module.register_forward_hook(count_rows).remove)
        record = stack.enter_context(GateRecord(gates, coactivation=False, trace=0))
        stack.enter_context(_left_as_it_was(model))
        if isinstance(example, Mapping):
            model(**example)
        else:
            model(*(example if isinstance(example, tuple) else (example,)))
    return rows, record


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; afterwards modes and random numbers are those from before.

    Modes are set one by one: `model.train()` would lose differences between modules, and may do more in some.
    """
    modes = {module: module.training for module in model.modules()}
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    try:
        for module in modes:
            module.training = False
        with torch.no_grad(), torch.random.fork_rng(devices):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
