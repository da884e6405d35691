"""Gated models as standard ops, for `torch.onnx.export` and whatever else knows no ops of ours.

    torch.onnx.export(blockgate.integrations.onnx.exportable(model), (x,), "model.onnx")

PyTorch's default exporter needs the package onnxscript; `dynamo=False` asks for the older one, which needs onnx only.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockgate.convert.replace import replace_layers
from blockgate.errors import invalid
from blockgate.gates.norm import NormGate
from blockgate.gates.sigmoid import SigmoidGate
from blockgate.gates.topk import TopKGate
from blockgate.layers.qrnn import QRNN, DynamicSparseQRNN
from blockgate.ops.topk_gates.reference import average, runner_up
from blockgate.runtime.exporting import NO_FORM
from blockgate.runtime.gated_recurrent import RunnableRecurrence
from blockgate.runtime.linear import RunnableLinear
from blockgate.runtime.packed import PackedDynamicSparseLinear, PackedLinear
from blockgate.runtime.packed_columns import PackedColumnLinear
from blockgate.runtime.packed_paired import PackedPairedLinear, PackedPairedMLP
from blockgate.runtime.packed_recurrent import PackedRecurrence
from blockgate.runtime.paired import ACTIVATIONS, PairedLinear, RunnableMLP

__all__ = ["exportable"]

PACKED_LAYERS = (PackedLinear, PackedDynamicSparseLinear, PackedColumnLinear, PackedPairedMLP, PackedPairedLinear)
WITHOUT_FORM = (*PACKED_LAYERS, RunnableRecurrence, PackedRecurrence, QRNN, DynamicSparseQRNN)


def exportable(model: nn.Module) -> nn.Module:
    """A copy of a gated model for inference, of standard ops: the same results, at dense cost.

    Other runtimes have no kernel that reads open blocks only: they multiply closed gates as zeros. Export for where a
    model must run, not for speed.

    Args:
        model: with gated linear layers or paired MLPs, not packed. Gates of kind "topk", "margin", "norm" or "sigmoid".
    """
    for name, module in model.named_modules():
        if isinstance(module, WITHOUT_FORM):
            raise invalid(
                "exportable",
                expected="a model of gated linear layers, not packed",
                got=f"{type(module).__name__}{f' at {name!r}' if name else ''}",
                remedy="Export the model it was packed from." if type(module) in PACKED_LAYERS else NO_FORM,
            )
    made = copy.deepcopy(model).eval().requires_grad_(False)
    layers = [layer for layer in made.modules() if isinstance(layer, (RunnableLinear, RunnableMLP))]
    if not layers:
        raise invalid(
            "exportable",
            expected="a model with gated linear layers, not packed",
            got=type(model).__name__,
            remedy="A dense model needs none of this: export it as it is.",
        )
    standard: dict[nn.Module, nn.Module] = {
        layer: _StandardMLP(layer) if isinstance(layer, RunnableMLP) else _StandardLinear(layer) for layer in layers
    }
    if made in standard:
        return standard[made]
    replace_layers(made, standard)
    return made


class _Gated(nn.Module):
    """A gate of standard ops."""

    def __init__(self, layer: RunnableLinear | RunnableMLP) -> None:
        super().__init__()
        if type(layer.gate) is not NormGate and not isinstance(layer.gate, (TopKGate, SigmoidGate)):
            raise invalid(
                "exportable",
                expected="gates of kind topk, margin, norm or sigmoid",
                got=layer.gate.kind,
                remedy="Train with one of these kinds.",
            )
        self.grid = layer.grid
        self.gate = layer.gate

    def forward(self, rows: Tensor) -> Tensor:
        """All gates (N, num_blocks) of rows (N, in_features)."""
        gate = self.gate
        if isinstance(gate, SigmoidGate):
            values = torch.sigmoid(self._scores(rows))
            return values / values.mean(-1, keepdim=True)
        if isinstance(gate, NormGate):
            groups, normalise, scores = gate.grid.out_blocks, "none", gate.scores(rows)
        else:
            assert isinstance(gate, TopKGate)
            groups, normalise, scores = gate.groups, gate.normalise, self._scores(rows)
        by_group = scores.view(len(rows), groups, scores.shape[1] // groups)
        size, kept = by_group.shape[-1], gate.open_blocks
        margin = normalise.startswith("margin")
        if not margin:
            by_group = torch.relu(by_group)
        best, order = by_group.topk(min(kept + 1, size), dim=-1)
        values = best[..., :kept]
        if margin:
            values = values - runner_up(by_group, order, kept, normalise)
        flat = values.flatten(1)
        values = (flat / average(flat, scores.shape[1], normalise)).view_as(values)
        if isinstance(gate, NormGate):
            values = (values > 0).to(rows.dtype)
        return torch.zeros_like(by_group).scatter(-1, order[..., :kept], values).flatten(1)

    def _scores(self, rows: Tensor) -> Tensor:
        gate, network = self.gate, self.gate.network()
        key = gate.key_of(rows)
        if network.hidden_weight is not None:
            key = torch.relu(F.linear(key, network.hidden_weight, network.hidden_bias))
        return F.linear(key, network.weight, network.bias)


class _StandardLinear(nn.Module):
    """A gated linear layer whose products are dense ones, of inputs that are 0 where gates are closed."""

    def __init__(self, layer: RunnableLinear) -> None:
        super().__init__()
        layer.gate.see(layer._matrix())
        self.grid = layer.grid
        self.gates = _Gated(layer)
        self.weight = nn.Parameter(layer._matrix().detach().clone(), requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """y (..., out_features) for x (..., in_features)."""
        grid = self.grid
        rows = x.reshape(-1, grid.in_features)
        gates = self.gates(rows).view(-1, grid.out_blocks, grid.in_blocks)
        width, parts = min(grid.block[1], grid.in_features), []
        for row, weight in enumerate(self.weight.split(grid.block[0])):
            wide = gates[:, row, :, None].expand(-1, -1, width).reshape(-1, grid.in_blocks * width)
            parts.append(F.linear(rows * wide[:, : grid.in_features], weight))
        y = torch.cat(parts, 1)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], grid.out_features)


class _StandardMLP(nn.Module):
    """A paired MLP whose products are dense ones, of hidden channels that are 0 where gates are closed."""

    def __init__(self, layer: RunnableMLP) -> None:
        super().__init__()
        self.gates = _Gated(layer)
        self.width, self.activation = min(layer.grid.block[0], layer.hidden_features), layer.activation
        self.up, self.down = _copied(layer.up), _copied(layer.down)
        self.gate_proj = None if layer.gate_proj is None else _copied(layer.gate_proj)

    def forward(self, x: Tensor) -> Tensor:
        """y (..., out_features) for x (..., in_features)."""
        rows = x.reshape(-1, self.up.in_features)
        function = self.activation
        activate = ACTIVATIONS[function] if isinstance(function, str) else function
        hidden = activate((self.gate_proj or self.up)(rows))
        if self.gate_proj is not None:
            hidden = hidden * self.up(rows)
        wide = self.gates(rows).unsqueeze(-1).expand(-1, -1, self.width).flatten(1)[:, : self.down.in_features]
        # Not a product alone: 0 times inf is no 0.
        y: Tensor = self.down(torch.where(wide == 0, torch.zeros_like(hidden), wide * hidden))
        return y.view(*x.shape[:-1], self.down.out_features)


def _copied(part: PairedLinear) -> nn.Linear:
    made = nn.Linear(part.in_features, part.out_features, part.bias is not None, device="meta")
    made.weight = nn.Parameter(part.matrix().detach().clone(), requires_grad=False)
    if part.bias is not None:
        made.bias = nn.Parameter(part.bias.detach().clone(), requires_grad=False)
    return made
