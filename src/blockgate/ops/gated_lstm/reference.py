"""The recurrence of a gated LSTM in plain PyTorch, step by step: the judge of the native one.

Symbols: T steps, N rows, H hidden units, E compact gates and S scores a row. The recurrent weight W (4H, H) is a gated
block product with the gate's key taken from h_{t-1}; gate order i, f, g, o as in nn.LSTM:

    pre_t = projected_t + (G(h_{t-1}) expanded to blocks * W) h_{t-1} + bias
    c_t = sigmoid(f) * c_{t-1} + sigmoid(i) * tanh(g)
    h_t = sigmoid(o) * tanh(c_t)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockgate.ops.gate_scores.reference import gate_scores
from blockgate.ops.gated_linear.reference import gated_linear, gated_linear_backward
from blockgate.ops.topk_gates.reference import topk_gates, topk_gates_backward

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["gated_lstm", "gated_lstm_backward", "state_product", "state_product_backward", "weight_gradient"]


def gated_lstm(
    projected: Tensor,
    h0: Tensor,
    c0: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    hidden_weight: Tensor | None,
    hidden_bias: Tensor | None,
    key: Sequence[int],
    block: Sequence[int],
    selection: Sequence[int],
    normalise: str,
) -> tuple[Tensor, ...]:
    """projected (T, N, 4H), h0 and c0 (N, H) -> output (T, N, H), c_n (N, H), and what the backward pass needs.

    `key` is (offset, size), `block` (out, in), `selection` (open_blocks, groups). The backward pass needs cells
    (T, N, H); activations (T, N, 4H), the gates of the cell after sigmoid and tanh; hidden (T, N, G), the hidden layer
    of the block gate after ReLU, or empty; scores (T, N, S); gates and indices (T, N, E).
    """
    gate = (gate_weight, gate_bias, hidden_weight, hidden_bias)
    h, c = h0, c0
    steps = []
    for projected_t in projected:
        product, decided = state_product(h, weight, bias, gate, key, block, selection, normalise)
        i, f, g, o = (projected_t + product).chunk(4, dim=1)
        i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
        c = f * c + i * g
        h = o * torch.tanh(c)
        steps.append((h, c, torch.cat([i, f, g, o], 1), *decided))
    output, cells, activations, hidden, scores, gates, indices = (torch.stack(s) for s in zip(*steps, strict=True))
    if hidden_weight is None:
        hidden = projected.new_empty(0)
    return output, c.clone(), cells, activations, hidden, scores, gates, indices


def gated_lstm_backward(
    weight: Tensor,
    gate_weight: Tensor,
    hidden_weight: Tensor | None,
    h0: Tensor,
    c0: Tensor,
    output: Tensor,
    cells: Tensor,
    activations: Tensor,
    hidden: Tensor,
    scores: Tensor,
    gates: Tensor,
    indices: Tensor,
    grad_output: Tensor | None,
    grad_c_n: Tensor | None,
    key: Sequence[int],
    block: Sequence[int],
    selection: Sequence[int],
    normalise: str,
    need_weight: bool,
) -> tuple[Tensor, ...]:
    """Gradients of projected (T, N, 4H), h0, c0 (N, H), weight (empty if not needed), scores (T, N, S) and, before its
    ReLU, hidden (T, N, G; empty without one). Those of the gate's weights are plain products of the last two.
    """
    before = torch.cat([h0[None], output[:-1]])
    cells_before = torch.cat([c0[None], cells[:-1]])
    grad_projected, grad_scores = torch.empty_like(activations), torch.empty_like(scores)
    grad_hidden = torch.empty_like(hidden)
    grad_h = torch.zeros_like(h0)
    grad_c = torch.zeros_like(c0) if grad_c_n is None else grad_c_n
    for t in reversed(range(len(output))):
        if grad_output is not None:
            grad_h = grad_h + grad_output[t]
        i, f, g, o = activations[t].chunk(4, dim=1)
        tanh_c = torch.tanh(cells[t])
        grad_c = grad_c + grad_h * o * (1 - tanh_c * tanh_c)
        grad_i, grad_f, grad_g = grad_c * g, grad_c * cells_before[t], grad_c * i
        grad_o = grad_h * tanh_c
        grad_projected[t] = torch.cat(
            [grad_i * i * (1 - i), grad_f * f * (1 - f), grad_g * (1 - g * g), grad_o * o * (1 - o)], 1
        )
        grad_c = grad_c * f
        decided = (hidden if hidden_weight is None else hidden[t], scores[t], gates[t], indices[t])
        grad_h, grad_scores[t], grad_hidden_t = state_product_backward(
            grad_projected[t], before[t], weight, gate_weight, hidden_weight, decided, key, block, selection, normalise
        )
        if grad_hidden_t is not None:
            grad_hidden[t] = grad_hidden_t
    grad_weight = weight_gradient(grad_projected, before, weight, gates, indices, block, need_weight)
    return grad_projected, grad_h, grad_c, grad_weight, grad_scores, grad_hidden


def state_product(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    key: Sequence[int],
    block: Sequence[int],
    selection: Sequence[int],
    normalise: str,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The gated product of the state (N, H), and what was decided on the way: hidden, scores, gates, indices."""
    gate_weight, gate_bias, hidden_weight, hidden_bias = gate
    key_offset, key_size = key
    scored = h[:, key_offset : key_offset + key_size]
    hidden = h.new_empty(0)
    if hidden_weight is not None:
        scored = hidden = torch.relu(gate_scores(scored, hidden_weight, hidden_bias))
    scores = gate_scores(scored, gate_weight, gate_bias)
    gates, indices = topk_gates(scores, selection, normalise)
    return gated_linear(h, weight, bias, gates, indices, block), (hidden, scores, gates, indices)


def state_product_backward(
    grad: Tensor,
    h: Tensor,
    weight: Tensor,
    gate_weight: Tensor,
    hidden_weight: Tensor | None,
    decided: tuple[Tensor, Tensor, Tensor, Tensor],
    key: Sequence[int],
    block: Sequence[int],
    selection: Sequence[int],
    normalise: str,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of h (N, H), of the scores, and of the hidden layer before its ReLU, if there is one."""
    hidden, scores, gates, indices = decided
    grad_h, _, grad_gates = gated_linear_backward(grad, h, weight, gates, indices, block, True, False, True)
    grad_scores = topk_gates_backward(grad_gates, scores, gates, indices, selection, normalise)
    grad_key, grad_hidden = grad_scores @ gate_weight, None
    if hidden_weight is not None:
        grad_hidden = torch.where(hidden <= 0, 0, grad_key)
        grad_key = grad_hidden @ hidden_weight
    grad_h[:, key[0] : key[0] + key[1]] += grad_key
    return grad_h, grad_scores, grad_hidden


def weight_gradient(
    grad_sums: Tensor, before: Tensor, weight: Tensor, gates: Tensor, indices: Tensor, block: Sequence[int], need: bool
) -> Tensor:
    """The gradient of the recurrent weight over all steps; empty if nobody needs it."""
    if not need:
        return weight.new_empty(0)
    rows = [x.flatten(0, 1) for x in (grad_sums, before, gates, indices)]
    _, grad_weight, _ = gated_linear_backward(rows[0], rows[1], weight, rows[2], rows[3], block, False, True, False)
    return grad_weight
