"""The library's side of a problem: the layer with its values, how it is called, and what it stores packed."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from blockgate.gates import Gate
from blockgate.layers import (
    DynamicSparseGRU,
    DynamicSparseGRUCell,
    DynamicSparseLinear,
    DynamicSparseLSTM,
    DynamicSparseLSTMCell,
    DynamicSparseMLP,
    DynamicSparseQRNN,
)
from blockgate.layers.conv1d import DynamicSparseConv1D

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blockgate.lab.selftest.problems import Problem

# Recurrent layers and cells of ours, by the name of a problem's layer.
STACKED: dict[str, Any] = {"lstm": DynamicSparseLSTM, "gru": DynamicSparseGRU}
STEPPED: dict[str, Any] = {"cell": DynamicSparseLSTMCell, "gru_cell": DynamicSparseGRUCell}

__all__ = ["STACKED", "Built", "Called", "autocast", "build", "call", "call_with_gradients", "draw_values", "threads"]


@dataclass(slots=True)
class Built:
    """A layer and what it is called with; `alive` counts the rows of each step."""

    layer: nn.Module
    x: Tensor
    state: tuple[Tensor, ...] | None
    alive: list[int]
    random: np.random.Generator


@dataclass(slots=True)
class Called:
    """What a call gave: named outputs, and gradients by the name of what they belong to."""

    outputs: dict[str, Tensor]
    sent: dict[str, Tensor]
    grads: dict[str, Tensor]


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Runs torch on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def autocast(problem: Problem) -> Any:
    """The context in which a problem's layer is called with gradients."""
    return torch.autocast("cpu", getattr(torch, problem.autocast)) if problem.autocast else nullcontext()


def build(problem: Problem) -> Built:
    """The layer of a problem, in eval mode unless it says otherwise, and its input."""
    random = np.random.default_rng([22, problem.seed])
    dtype = getattr(torch, problem.dtype)
    options = problem.options()
    bias = problem.bias
    if problem.layer == "linear":
        layer: Any = DynamicSparseLinear(problem.inputs, problem.out, bias, dtype=dtype, **options)
    elif problem.layer == "mlp":
        options |= {"activation": problem.activation, "glu": problem.glu}
        layer = DynamicSparseMLP(problem.inputs, problem.channels, problem.out, bias, dtype=dtype, **options)
    elif problem.layer == "conv1d":
        layer = DynamicSparseConv1D(problem.inputs, problem.out, bias, dtype=dtype, **options)
    elif problem.is_stack:
        options["bidirectional"] = problem.bidirectional
        layer = STACKED[problem.layer](problem.inputs, problem.out, problem.layers, bias, dtype=dtype, **options)
    elif problem.is_cell:
        layer = STEPPED[problem.layer](problem.inputs, problem.out, bias, dtype=dtype, **options)
    else:
        pooled: dict[str, Any] = {"window": problem.window, "pooling": problem.pooling}
        layer = DynamicSparseQRNN(problem.inputs, problem.out, problem.layers, bias, dtype=dtype, **pooled, **options)
    with torch.no_grad():
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            scale = 1 / np.sqrt(tensor.shape[-1]) if tensor.dim() > 1 else 0.3
            tensor.copy_(draw_values(random, tuple(tensor.shape), problem.values, scale, in_gate="gate" in name))
            if problem.values == "twins" and name.endswith(("gate.weight", "gate.bias")):
                half = len(tensor) // 2
                tensor[half : 2 * half] = tensor[:half] * (1 + 2e-8 * float(random.integers(-3, 4)))
    layer.train(problem.training)
    alive = _alive(problem, random)
    x = draw_values(random, (sum(alive), problem.inputs), problem.values, 1.0).to(dtype)
    if problem.strided:
        # Rows apart, as those of a larger tensor are.
        x = torch.stack([x, x + 1], 1).flatten(1)[:, : problem.inputs] if x.numel() else x
    state: tuple[Tensor, ...] | None = None
    if (problem.is_stack or problem.is_cell) and (problem.values == "bad_state" or random.random() < 0.7):
        shape = (problem.layers * problem.directions, problem.rows, problem.out)
        state = (torch.from_numpy(np.tanh(random.standard_normal(shape))).to(dtype), _normal(random, shape, dtype))
        state = state[:1] if problem.layer.startswith("gru") else state
    return Built(layer, x, state, alive, random)


def call(problem: Problem, built: Built, layer: nn.Module, part: tuple[int, int] | None = None) -> dict[str, Tensor]:
    """Outputs of one call as rows, without gradients; of `part` of the batch only, if it is given."""
    x, state = built.x, built.state
    if part is not None:
        begin, end = part
        if problem.is_stack or problem.layer == "qrnn":
            x = x.view(problem.steps, problem.rows, problem.inputs)[:, begin:end].flatten(0, 1)
            # As a batch of its own, whose rows lie side by side.
            built = replace(built, alive=[end - begin] * problem.steps)
            problem = replace(problem, rows=end - begin)
        else:
            x = x[begin:end]
        state = None if state is None else tuple(s[:, begin:end] for s in state)
    with torch.no_grad():
        if problem.threads == torch.get_num_threads():
            return _forward(problem, built, layer, x, state)
        with threads(problem.threads):
            return _forward(problem, built, layer, x, state)


def call_with_gradients(problem: Problem, built: Built, sent: dict[str, Tensor] | None = None) -> Called:
    """Outputs of one call, and the gradients of input, state and parameters for random ones of the outputs.

    `sent` are those of the outputs, if they are not to be drawn.
    """
    x = built.x.detach().requires_grad_()
    state = None if built.state is None else tuple(s.detach().requires_grad_() for s in built.state)
    for parameter in built.layer.parameters():
        parameter.grad = None
    with threads(problem.threads):
        with autocast(problem):
            outputs = _forward(problem, built, built.layer, x, state)
        sent = sent or {name: _normal(built.random, tuple(t.shape), t.dtype) for name, t in outputs.items()}
        with_grad = [name for name, t in outputs.items() if t.requires_grad]
        torch.autograd.backward([outputs[name] for name in with_grad], [sent[name] for name in with_grad])
    named = {"x": x, **dict(built.layer.named_parameters())}
    if state is not None:
        named |= dict(zip(("h0", "c0"), state, strict=False))
    grads = {name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in named.items()}
    return Called({name: t.detach() for name, t in outputs.items()}, sent, grads)


def _forward(
    problem: Problem, built: Built, layer: Any, x: Tensor, state: tuple[Tensor, ...] | None
) -> dict[str, Tensor]:
    if problem.layer in {"linear", "conv1d", "mlp"}:
        return {"y": layer(x)}
    if problem.layer == "cell":
        h, c = layer(x, None if state is None else (state[0][0], state[1][0]))
        return {"y": h, "h_n": h.new_empty(0), "c_n": c}
    if problem.layer == "gru_cell":
        return {"y": layer(x, None if state is None else state[0][0])}
    if problem.layer == "qrnn":
        y, states = layer(x.view(problem.steps, problem.rows, problem.inputs))
        return {"y": y.flatten(0, 1)} | {f"c_{i}": s for i, (s, _) in enumerate(states)}
    gru = problem.layer == "gru"
    if len(set(built.alive)) == 1:
        y, last = layer(x.view(len(built.alive), -1, problem.inputs), state[0] if gru and state else state)
        y = y.flatten(0, 1)
    else:
        y, last = layer(PackedSequence(x, torch.tensor(built.alive)), state[0] if gru and state else state)
        y = y.data
    return {"y": y} | dict(zip(("h_n", "c_n"), (last,) if gru else last, strict=False))


def gates_by_name(layer: nn.Module) -> dict[str, Gate]:
    """The gates of a layer, by the name of their module."""
    return {name: module for name, module in layer.named_modules() if isinstance(module, Gate)}


def _alive(problem: Problem, random: np.random.Generator) -> list[int]:
    if not problem.ragged or problem.rows == 0:
        return [problem.rows] * problem.steps
    lengths = sorted((int(random.integers(1, problem.steps + 1)) for _ in range(problem.rows)), reverse=True)
    lengths[0] = problem.steps
    sequences = pack_padded_sequence(torch.zeros(problem.steps, problem.rows), torch.tensor(lengths))
    return [int(n) for n in sequences.batch_sizes]


def _normal(random: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(random.standard_normal(shape)).to(dtype)


def draw_values(
    random: np.random.Generator, shape: tuple[int, ...], values: str, scale: float, *, in_gate: bool = False
) -> Tensor:
    """Values (shape) of a kind; see `problems.VALUES`."""
    drawn = random.standard_normal(shape)
    if values == "whole":
        return torch.from_numpy(np.round(drawn * 1.5))
    drawn = drawn * scale
    if values == "wide":
        drawn = drawn * 2.0 ** random.integers(-15, 15, shape)
    elif values == "sparse":
        drawn = drawn * (random.random(shape) < 0.1)
    elif values == "extreme" and not in_gate:
        # All of one size, most of one sign: sums as large as they can be.
        drawn = np.where(random.random(shape) < random.choice([0.0, 0.01, 0.5]), -1.0, 1.0) * (scale * 3.7)
    elif values in {"huge", "tiny"} and (in_gate or scale == 1.0):
        drawn = drawn * (1e100 if values == "huge" else 1e-100) * (0 if len(shape) == 1 else 1)
    return torch.from_numpy(drawn)
