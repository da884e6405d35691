"""Where a model has MLPs whose layers can share one gate: up (and gate) projection, activation, down projection."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from blockgate.convert.closeness import evaluating
from blockgate.convert.replace import Place
from blockgate.layers.conv1d import stores_transposed
from blockgate.layers.mlp import DynamicSparseMLP
from blockgate.runtime.paired import ACTIVATIONS, PairedLinear, name_of_activation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blockgate.spec import GateSpec

__all__ = ["Pair", "find_pairs"]


@dataclass(frozen=True, eq=False)
class Pair:
    """An MLP of a model that `DynamicSparseMLP` can compute: the MLP takes the place of the activation.

    Its layers keep their places, and so their weights keep their names; they pass on what they are given.

    Args:
        name: where the MLP will be, the name of the activation.
        place: the same.
        up: the layer whose output is activated; with `factor` the one that is multiplied with it.
        down: the layer that reads the hidden channels.
        gate_proj: the layer whose output is activated where there is another factor; None otherwise.
        activation: one of `ACTIVATIONS`.
        dropout: the place of a dropout of hidden channels, or None.
        names: of the layers.
    """

    name: str
    place: Place
    up: nn.Module
    down: nn.Module
    gate_proj: nn.Module | None
    activation: str
    dropout: Place | None
    names: dict[nn.Module, str] = field(repr=False)

    @property
    def layers(self) -> list[nn.Module]:
        """Its linear layers."""
        return [layer for layer in (self.up, self.gate_proj, self.down) if layer is not None]

    @property
    def kind(self) -> str:
        """The layers, as reports show them."""
        return " + ".join(self.names[layer].rpartition(".")[2] for layer in self.layers)

    @property
    def sizes(self) -> tuple[int, int]:
        """Hidden channels and inputs."""
        return _sizes(self.up)

    def make(self, spec: GateSpec) -> dict[nn.Module | Place, nn.Module]:
        """What comes into the place of what: the MLP, and its layers as they are in a model that has it."""
        held = {
            layer: _held(layer, multiplies=layer is self.up and self.gate_proj is not None) for layer in self.layers
        }
        dropped = None if self.dropout is None else cast("nn.Dropout", self.dropout.now())
        made: dict[Any, nn.Module] = {**held}
        made[self.place] = DynamicSparseMLP.around(
            held[self.up],
            held[self.down],
            None if self.gate_proj is None else held[self.gate_proj],
            activation=self.activation,
            dropout=0.0 if dropped is None else dropped.p,
            training=self.up.training,
            spec=spec,
        )
        if self.dropout is not None:
            made[self.dropout] = nn.Identity()
        return made

    def hidden(self, x: Tensor) -> Tensor:
        """The hidden channels (N, H) of rows x (N, in), as the dense layers compute them."""
        function = ACTIVATIONS[self.activation]
        if self.gate_proj is None:
            return function(self.up(x))
        return cast("Tensor", function(self.gate_proj(x)) * self.up(x))


@dataclass(frozen=True)
class _Shape:
    """How a class of modules names the parts of its MLP, as paths."""

    up: str
    down: str
    activation: str
    gate_proj: str = ""
    dropout: str = ""
    # What computes the MLP or its first half, and which: its result is compared before anything is changed.
    whole: str | None = None
    half: str | None = None


SHAPES = (
    # Llama and most decoders after it.
    _Shape("up_proj", "down_proj", "act_fn", gate_proj="gate_proj", whole=""),
    # GPT-2.
    _Shape("c_fc", "c_proj", "act", whole=""),
    # DistilBERT.
    _Shape("lin1", "lin2", "activation", whole=""),
    # BERT and its relatives: two modules of one layer.
    _Shape("intermediate.dense", "output.dense", "intermediate.intermediate_act_fn", half="intermediate"),
)
# Torch's own layers.
TORCH = _Shape("linear1", "linear2", "activation", dropout="dropout")


def find_pairs(model: nn.Module) -> list[Pair]:
    """Every MLP of `model` of a known shape, in the order of definition. The model is not changed.

    A module that only looks like one is left out: its result for a random input is compared with the formula.
    """
    # Who calls a layer, and who holds a weight: what is used in two places must go on as it is.
    parents: dict[object, set[nn.Module]] = {}
    for parent in model.modules():
        for part in (*parent._modules.values(), *parent._parameters.values()):
            if part is not None:
                parents.setdefault(part, set()).add(parent)
    found: list[Pair] = []
    taken: set[nn.Module] = set()
    for name, module in model.named_modules():
        for pair in _pairs_in(module, name):
            alone = all(len(parents[part]) == 1 for layer in pair.layers for part in (layer, *layer.parameters()))
            if alone and taken.isdisjoint(pair.layers):
                taken.update(pair.layers)
                found.append(pair)
    return found


def _pairs_in(module: nn.Module, name: str) -> Iterator[Pair]:
    if type(module) is nn.Sequential:
        yield from _pairs_in_sequence(module, name)
    elif type(module) in {nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}:
        if (pair := _pair_of(module, name, TORCH)) is not None:
            yield pair
    else:
        for shape in SHAPES:
            pair = _pair_of(module, name, shape)
            if pair is not None and _computes(module, shape, pair):
                yield pair


def _pairs_in_sequence(module: nn.Sequential, name: str) -> Iterator[Pair]:
    keys, layers = [*module._modules], [*module]
    for i in range(len(layers) - 2):
        dropout = isinstance(layers[i + 2], nn.Dropout) and i + 3 < len(layers)
        down = i + 3 if dropout else i + 2
        if _is_linear(layers[i]) and not _is_linear(layers[i + 1]) and _is_linear(layers[down]):
            shape = _Shape(keys[i], keys[down], keys[i + 1], dropout=keys[i + 2] if dropout else "")
            if (pair := _pair_of(module, name, shape)) is not None:
                yield pair


def _pair_of(module: nn.Module, name: str, shape: _Shape) -> Pair | None:
    """The MLP of this shape, if the module has these parts and they fit."""
    up, down, activation = (_at(module, path) for path in (shape.up, shape.down, shape.activation))
    gate_proj = _at(module, shape.gate_proj) if shape.gate_proj else None
    layers = [up, down, gate_proj] if shape.gate_proj else [up, down]
    if not all(_is_linear(layer) for layer in layers) or not callable(activation):
        return None
    if _sizes(up)[0] != _sizes(down)[1] or (gate_proj is not None and _sizes(gate_proj) != _sizes(up)):
        return None
    if isinstance(activation, nn.Module) and any(True for _ in activation.parameters()):
        return None
    known = name_of_activation(activation)
    dropout = _at(module, shape.dropout) if shape.dropout else None
    if known is None or (dropout is not None and (type(dropout) is not nn.Dropout or dropout.p >= 1)):
        return None

    def full(path: str) -> str:
        return f"{name}.{path}" if name else path

    paths = {up: full(shape.up), down: full(shape.down)} | ({gate_proj: full(shape.gate_proj)} if gate_proj else {})
    return Pair(
        name=full(shape.activation),
        place=_place(module, shape.activation),
        up=up,
        down=down,
        gate_proj=gate_proj,
        activation=known,
        dropout=None if dropout is None else _place(module, shape.dropout),
        names=paths,
    )


@torch.no_grad()
def _computes(module: nn.Module, shape: _Shape, pair: Pair) -> bool:
    """Whether the module gives what the formula gives, for random rows; taken on trust where weights have no values."""
    judged = _at(module, shape.half) if shape.half else module
    weight = cast("Tensor", pair.up.weight)
    if weight.is_meta:
        return True
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, pair.sizes[1], generator=generator).to(weight)
    expected = pair.hidden(x)
    if not shape.half:
        expected = pair.down(expected)
    # Each part must be called, once: a module may compute the same and go around the one that will be replaced.
    parts = [layer for layer in pair.layers if layer is not pair.down or not shape.half]
    calls: list[object] = []
    before = pair.place.now()
    handles = [part.register_forward_hook(lambda called, *_: calls.append(called)) for part in parts]
    heard = _Heard(before, calls)
    pair.place.put(heard)
    try:
        with evaluating(judged):
            result = judged(x)
    except Exception:
        return False
    finally:
        pair.place.put(before)
        for handle in handles:
            handle.remove()
    if len(calls) != len(parts) + 1 or {*calls} != {*parts, heard}:
        return False
    if not isinstance(result, Tensor) or result.shape != expected.shape:
        return False
    return bool((result - expected).norm() <= 1e-2 * expected.norm())


class _Heard(nn.Module):
    """An activation that notes its calls."""

    def __init__(self, function: Any, calls: list[object]) -> None:
        super().__init__()
        self.function, self.calls = [function], calls

    def forward(self, x: Tensor) -> Any:
        """As the activation."""
        self.calls.append(self)
        return self.function[0](x)


def _held(layer: nn.Module, *, multiplies: bool) -> PairedLinear:
    made = PairedLinear(
        cast("nn.Parameter", layer.weight),
        cast("nn.Parameter | None", layer.bias),
        transposed=stores_transposed(layer),
        multiplies=multiplies,
    )
    return made.train(layer.training)


def _is_linear(layer: object) -> bool:
    return type(layer) is nn.Linear or (stores_transposed(layer) and not hasattr(layer, "gate"))


def _sizes(layer: Any) -> tuple[int, int]:
    """Outputs and inputs of a linear layer."""
    out, inputs = layer.weight.shape
    return (inputs, out) if stores_transposed(layer) else (out, inputs)


def _at(module: Any, path: str) -> Any:
    """What a path of attributes leads to, or None."""
    for part in path.split("."):
        module = getattr(module, part, None)
    return module


def _place(module: nn.Module, path: str) -> Place:
    owner, _, attribute = path.rpartition(".")
    return Place(_at(module, owner) if owner else module, attribute)
