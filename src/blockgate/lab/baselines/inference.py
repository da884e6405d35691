"""Inference of pruned and static models by the fastest way there is for each, so that its time is fair."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from blockgate.convert import pack
from blockgate.errors import invalid
from blockgate.lab.baselines.patterns import found_pattern
from blockgate.lab.baselines.static import StaticBlockLinear, StaticBlockLSTM
from blockgate.layers import DynamicSparseLinear, DynamicSparseLSTM
from blockgate.layers.dropout import is_hooked
from blockgate.runtime.cells import State
from blockgate.runtime.recurrent import LSTMInterface, Segments, has_projection, run_layer, run_layers, step_by_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockgate.gates import Gate
    from blockgate.grid import BlockGrid

__all__ = ["SparseLSTM", "SparseLinear", "to_block_inference", "to_sparse_inference"]

# A weight with fewer zeros was not pruned: it stays dense.
LEAST_ZEROS = 0.01

LINEAR = {nn.Linear, StaticBlockLinear}
LSTMS = {nn.LSTM, StaticBlockLSTM}


def to_sparse_inference(model: nn.Module) -> nn.Module:
    """A copy of `model` for inference whose pruned linear layers and LSTMs compute with torch's CSR format.

    Args:
        model: any module; a layer counts as pruned if one of its matrices has zeros in it, at least 1%.

    Returns:
        The copy, in eval mode, without gradients, on the CPU. Its results are those of `model`, up to rounding.
    """
    return _replaced(model, "to_sparse_inference", _sparse_layer)


def to_block_inference(
    model: nn.Module,
    dtype: str | torch.dtype = torch.float32,
    *,
    block_size: int | tuple[int, int],
    screened: str | Sequence[str] = (),
) -> nn.Module:
    """A packed copy of `model` for inference that computes only blocks with something in them, by our kernels.

    The open blocks are given to the kernels by a gate that has learnt nothing: it reads one feature, ignores it, and
    opens each of these blocks with the value 1.

    Args:
        model: with layers pruned in blocks, or static ones; all else is packed as `pack` does it.
        dtype: what weights are stored as, as in `pack`.
        block_size: the blocks in which it was pruned; static layers know their own.
        screened: name patterns of output layers, as in `pack`.
    """
    gated = _replaced(model, "to_block_inference", partial(_block_layer, block_size=block_size))
    return pack(gated, dtype, screened=screened)


def _replaced(model: nn.Module, what: str, make: Any) -> nn.Module:
    """A copy of `model` with those layers replaced of which `make` makes something."""
    made = {id(m): new for m in model.modules() if _is_replaceable(m) and (new := make(m)) is not None}
    if not made:
        raise invalid(
            what, expected="a model with pruned or static layers", got=type(model).__name__, remedy="Prune it first."
        )
    # deepcopy takes what its memo already knows.
    return copy.deepcopy(model, made).eval().requires_grad_(False)


def _is_replaceable(module: nn.Module) -> bool:
    if is_hooked(module):
        return False
    if isinstance(module, nn.LSTM):
        return type(module) in LSTMS and not module.bidirectional and not has_projection(module)
    return type(module) in LINEAR


def _weights(layer: nn.Module) -> dict[str, Tensor]:
    """The matrices of a layer as it computes with them."""
    weights = {name: p.detach() for name, p in layer.named_parameters(recurse=False) if p.dim() == 2}
    if isinstance(layer, StaticBlockLinear):
        return {name: weight * layer.mask() for name, weight in weights.items()}
    if isinstance(layer, StaticBlockLSTM):
        return {name: weight * layer.mask(name) for name, weight in weights.items()}
    return weights


def _bias(layer: nn.Module, name: str) -> Tensor | None:
    bias = layer._parameters.get(name)
    return None if bias is None else bias.detach().clone()


def _is_pruned(weight: Tensor) -> bool:
    return float((weight == 0).double().mean()) >= LEAST_ZEROS


def _sparse_layer(layer: nn.Module) -> nn.Module | None:
    weights = _weights(layer)
    if not any(_is_pruned(weight) for weight in weights.values()):
        return None
    if isinstance(layer, nn.LSTM):
        return SparseLSTM(layer, weights)
    return SparseLinear(weights["weight"], _bias(layer, "bias"))


class SparseLinear(nn.Module):
    """y = W x + b with W in torch's CSR format. For inference on the CPU; it is not saved in checkpoints.

    Args:
        weight: (m, n).
        bias: (m) or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        with warnings.catch_warnings():
            # torch calls its CSR tensors a beta; they are what there is.
            warnings.filterwarnings("ignore", message=".*[Ss]parse CSR tensor support is in beta")
            self.weight = weight.float().cpu().to_sparse_csr()
        self.bias = torch.zeros(self.out_features) if bias is None else bias.float().cpu()

    def forward(self, x: Tensor) -> Tensor:
        """y (..., m) for x (..., n)."""
        rows = x.reshape(-1, self.in_features)
        if len(rows) == 1:
            y = torch.addmv(self.bias, self.weight, rows[0])
        else:
            y = torch.addmm(self.bias[:, None], self.weight, rows.T).T
        return y.reshape(*x.shape[:-1], self.out_features)

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseLinear:
        # torch refuses to copy CSR tensors.
        made = SparseLinear(self.weight.to_dense(), self.bias.clone()).train(self.training)
        memo[id(self)] = made
        return made


class SparseLSTM(LSTMInterface):
    """nn.LSTM with all its matrices in torch's CSR format. For inference on the CPU.

    Args:
        lstm: the layer, of one direction.
        weights: its matrices by name.
    """

    def __init__(self, lstm: nn.LSTM, weights: dict[str, Tensor]) -> None:
        super().__init__(lstm.input_size, lstm.hidden_size, lstm.num_layers, lstm.batch_first)
        for name, weight in weights.items():
            end = name.removeprefix("weight_")
            self.add_module(end, SparseLinear(weight, _bias(lstm, f"bias_{end}")))

    def _run(self, rows: Tensor, segments: Segments, state: State) -> tuple[Tensor, State]:
        layers = [
            partial(
                run_layer,
                segments=segments,
                product=self.get_submodule(f"ih_l{n}"),
                recurrence=partial(step_by_step, product=self.get_submodule(f"hh_l{n}")),
            )
            for n in range(self.num_layers)
        ]
        return run_layers(rows, state, layers)


def _block_layer(layer: nn.Module, block_size: int | tuple[int, int]) -> nn.Module | None:
    """The gated layer that opens exactly the blocks of a static or pruned one; None if there is nothing to save."""
    weights = _weights(layer)
    if isinstance(layer, StaticBlockLinear):
        block_size = layer.grid.block
    if isinstance(layer, StaticBlockLSTM):
        block_size = next(iter(layer.grids.values())).block
    options: dict[str, Any] = {"block_size": block_size, "key_size": 1, "normalise": "none", "select": "global"}
    made: DynamicSparseLinear | DynamicSparseLSTM
    # from_dense shares parameters, and those of the model are not to be frozen with the copy's.
    copied = copy.deepcopy(layer)
    if isinstance(copied, nn.LSTM):
        made = DynamicSparseLSTM.from_dense(copied, **options)
        gates = {name: cast("Gate", made.get_submodule(name.replace("weight", "gate", 1))) for name in weights}
    else:
        made = DynamicSparseLinear.from_dense(cast("nn.Linear", copied), **options)
        gates = {"weight": made.gate}
    patterns = {name: found_pattern(weight, gates[name].grid) for name, weight in weights.items()}
    if all(bool(pattern.all()) for pattern in patterns.values()):
        return None
    for name, gate in gates.items():
        _fix(gate, patterns[name])
    return made


@torch.no_grad()
def _fix(gate: Gate, pattern: Tensor) -> None:
    """Lets a gate open the blocks of a pattern (r, c) and no others, whatever its input."""
    gate.weight = nn.Parameter(torch.zeros_like(gate.weight))
    gate.bias = nn.Parameter(pattern.flatten().to(gate.bias))
    grid: BlockGrid = gate.grid
    # At least one block may open, even of a weight that is all zeros; with a score of 0 it doesn't.
    gate.target_sparsity = 1 - max(1, int(pattern.sum())) / grid.num_blocks
