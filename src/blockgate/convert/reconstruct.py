"""Layer after layer brought back to what the dense model computes: minutes, and no labels."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockgate.convert.closeness import call, evaluating
from blockgate.errors import invalid
from blockgate.find import outermost
from blockgate.grid import check_size
from blockgate.runtime.linear import RunnableLinear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["reconstruct"]

SMALLEST = 1e-12
# Of the input, in the closed form.
ROWS_AT_ONCE = 2048


class _ReachedError(Exception):
    """Ends a pass at the layer whose input was wanted."""


def reconstruct(
    model: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Any],
    *,
    steps: int = 200,
    rows: int = 256,
    lr: float = 1e-3,
    weights: bool = True,
    ridge: float | None = 1e-2,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Brings one gated linear layer after the other to give the outputs that the dense model has in its place.

    First the weight and bias that do so best, with the gates as they are, by least squares in closed form; then updates
    of weight, bias and gate together.

    Each layer gets its input from the layers before it as they are by then, closed blocks included, so that it also
    learns to make good for them. One that comes no closer keeps what it had. Every layer takes one pass over the
    batches of both models; memory holds the inputs and outputs of one layer.

    Args:
        model: a gated copy of `teacher`, each layer at the sparsity it is to have.
        teacher: the dense model. Its parameters must be others, or those of `model` are changed with it.
        batches: as for `calibrate`.
        steps: updates of every layer, by Adam; 0 for the closed form only.
        rows: of the input in each update.
        lr: of Adam, falling to 0.
        weights: change weight and bias of the layer too; otherwise its gate only.
        ridge: of the closed form, what draws weights to those that the layer has: added to the diagonal of the normal
            equations, relative to their mean. Take more where rows are few. None leaves the closed form out.
        progress: called with how many layers are done, and of how many.

    Returns:
        By layer, the relative error of its output that is left: |y - y of the teacher| / |y of the teacher|.
    """
    steps, rows = steps and check_size("steps", steps), check_size("rows", rows)
    kept = [] if isinstance(batches, (Tensor, dict)) else list(batches)
    if not kept:
        raise invalid("batches", expected="a list of inputs", got=type(batches).__name__, remedy="Put one in a list.")
    layers: dict[RunnableLinear, str] = {}
    for name, layer in outermost(model, (RunnableLinear,)):
        layers.setdefault(cast("RunnableLinear", layer), name)
    own = {id(p) for p in model.parameters()}
    if not layers or any(id(p) in own for p in teacher.parameters()):
        raise invalid(
            "reconstruct",
            expected="a model with gated linear layers, and a teacher with parameters of its own",
            got=f"{len(layers)} layers" if not layers else "shared parameters",
            remedy="Take teacher = copy.deepcopy(model) before sparsify_.",
        )
    errors = {}
    for done, (layer, name) in enumerate(layers.items()):
        if progress is not None:
            progress(done, len(layers))
        place = teacher.get_submodule(name)
        with evaluating(model), evaluating(teacher), torch.no_grad():
            inputs = torch.cat([_seen(model, layer, batch, output=False) for batch in kept])
            wanted = torch.cat([_seen(teacher, place, batch, output=True) for batch in kept])
        if weights and ridge is not None:
            _keep_if_closer(layer, inputs, wanted, partial(_solve, layer, inputs, wanted, ridge))
        errors[name] = _keep_if_closer(
            layer, inputs, wanted, partial(_train, layer, inputs, wanted, steps, rows, lr, weights)
        )
    if progress is not None:
        progress(len(layers), len(layers))
    return errors


def _seen(model: nn.Module, layer: nn.Module, batch: Any, *, output: bool) -> Tensor:
    """All rows of the input or of the output that a layer has for a batch."""
    found: list[Tensor] = []

    def take(_: nn.Module, args: Any, *result: Any) -> None:
        tensor = result[0] if output else args[0]
        found.append(tensor.reshape(-1, tensor.shape[-1]).detach().clone())
        raise _ReachedError

    handle = layer.register_forward_hook(take) if output else layer.register_forward_pre_hook(take)
    try:
        call(model, batch)
    except _ReachedError:
        pass
    finally:
        handle.remove()
    if not found:
        raise invalid("batches", expected="inputs that reach every layer", got="one that doesn't", remedy="Drop it.")
    return found[0]


def _keep_if_closer(layer: RunnableLinear, inputs: Tensor, wanted: Tensor, change: Callable[[], None]) -> float:
    """Changes a layer unless that takes it further from what is wanted; the relative error that it then has."""
    training, start = layer.training, copy.deepcopy(layer.state_dict())
    size = wanted.square().mean().clamp(min=SMALLEST)

    def error() -> float:
        layer.eval()
        with torch.no_grad():
            return float(((layer(inputs) - wanted).square().mean() / size).sqrt())

    before = error()
    try:
        change()
        after = error()
        if not after < before:
            layer.load_state_dict(start)
    finally:
        layer.train(training)
    return min(after, before)


@torch.no_grad()
def _solve(layer: RunnableLinear, inputs: Tensor, wanted: Tensor, ridge: float) -> None:
    """Writes the weight and bias of least squares for each row of blocks, from inputs as its gates leave them."""
    grid, weight, bias = layer.grid, layer._matrix(), layer.bias
    height, width = grid.block[0], min(grid.block[1], grid.in_features)
    for row in range(grid.out_blocks):
        outputs = slice(row * height, min((row + 1) * height, grid.out_features))
        known = weight[outputs].float()
        fitted = known if bias is None else torch.cat([known, bias[outputs, None].float()], 1)
        products = torch.zeros(fitted.shape[1], fitted.shape[1], device=known.device)
        shared = torch.zeros(fitted.shape[1], len(known), device=known.device)
        for first in range(0, len(inputs), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            gates = layer.gates(inputs[part])[:, row].float().repeat_interleave(width, 1)
            seen = inputs[part].float() * gates[:, : grid.in_features]
            if bias is not None:
                seen = F.pad(seen, (0, 1), value=1.0)
            products += seen.T @ seen
            shared += seen.T @ (wanted[part, outputs].float() - seen @ fitted.T)
        # From the weights that there are: the ridge draws what the rows don't tell to these, not to 0.
        products.diagonal().add_(ridge * products.diagonal().mean().clamp(min=SMALLEST))
        fitted = fitted + torch.linalg.solve(products, shared).T
        weight[outputs] = fitted[:, : grid.in_features].to(weight.dtype)
        if bias is not None:
            bias[outputs] = fitted[:, -1].to(bias.dtype)


def _train(
    layer: RunnableLinear, inputs: Tensor, wanted: Tensor, steps: int, rows: int, lr: float, weights: bool
) -> None:
    flags = {p: p.requires_grad for p in layer.parameters()}
    trained = list(layer.parameters() if weights else layer.gate.parameters())
    for p in flags:
        p.requires_grad_(any(p is own for own in trained))
    size = wanted.square().mean().clamp(min=SMALLEST)
    generator = torch.Generator().manual_seed(0)
    try:
        if trained and steps:
            optimizer = torch.optim.Adam(trained, lr)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
            layer.train()
            for _ in range(steps):
                chosen = torch.randint(len(inputs), (min(rows, len(inputs)),), generator=generator)
                loss = (layer(inputs[chosen]) - wanted[chosen]).square().mean() / size
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    finally:
        for p, flag in flags.items():
            p.requires_grad_(flag)
            p.grad = None
