"""The recurrence of a gated GRU in plain PyTorch, step by step: the judge of the native one.

Symbols as for the gated LSTM. The recurrent weight W (3H, H) is a gated block product with the gate's key taken from
h_{t-1}; gate order r, z, n as in nn.GRU, and the state's sum of n is multiplied by r, its bias included:

    s_t = (G(h_{t-1}) expanded to blocks * W) h_{t-1} + bias
    r_t, z_t = sigmoid(projected_t + s_t)
    n_t = tanh(projected_t + r_t * s_t)
    h_t = (1 - z_t) * n_t + z_t * h_{t-1}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockgate.ops.gated_lstm.reference import state_product, state_product_backward, weight_gradient

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["gated_gru", "gated_gru_backward"]


def gated_gru(
    projected: Tensor,
    h0: Tensor,
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
    """projected (T, N, 3H), h0 (N, H) -> output (T, N, H), and what the backward pass needs.

    That is: from_state (T, N, H), the state's sums of n; activations (T, N, 3H), the gates of the cell after sigmoid
    and tanh; and hidden, scores, gates and indices as for `gated_lstm`.
    """
    gate = (gate_weight, gate_bias, hidden_weight, hidden_bias)
    h = h0
    steps = []
    for projected_t in projected:
        product, decided = state_product(h, weight, bias, gate, key, block, selection, normalise)
        (x_r, x_z, x_n), (h_r, h_z, h_n) = projected_t.chunk(3, dim=1), product.chunk(3, dim=1)
        r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
        n = torch.tanh(x_n + r * h_n)
        h = n + z * (h - n)
        steps.append((h, h_n, torch.cat([r, z, n], 1), *decided))
    output, from_state, activations, hidden, scores, gates, indices = (torch.stack(s) for s in zip(*steps, strict=True))
    if hidden_weight is None:
        hidden = projected.new_empty(0)
    return output, from_state, activations, hidden, scores, gates, indices


def gated_gru_backward(
    weight: Tensor,
    gate_weight: Tensor,
    hidden_weight: Tensor | None,
    h0: Tensor,
    output: Tensor,
    from_state: Tensor,
    activations: Tensor,
    hidden: Tensor,
    scores: Tensor,
    gates: Tensor,
    indices: Tensor,
    grad_output: Tensor,
    key: Sequence[int],
    block: Sequence[int],
    selection: Sequence[int],
    normalise: str,
    need_weight: bool,
) -> tuple[Tensor, ...]:
    """Gradients of projected (T, N, 3H), h0 (N, H), the state's sums (T, N, 3H), weight (empty if not needed), scores
    (T, N, S) and, before its ReLU, hidden (T, N, G; empty without one).
    """
    before = torch.cat([h0[None], output[:-1]])
    grad_projected, grad_sums = torch.empty_like(activations), torch.empty_like(activations)
    grad_scores, grad_hidden = torch.empty_like(scores), torch.empty_like(hidden)
    grad_h = torch.zeros_like(h0)
    for t in reversed(range(len(output))):
        grad_h = grad_h + grad_output[t]
        r, z, n = activations[t].chunk(3, dim=1)
        grad_n = grad_h * (1 - z) * (1 - n * n)
        grad_r = grad_n * from_state[t] * r * (1 - r)
        grad_z = grad_h * (before[t] - n) * z * (1 - z)
        grad_projected[t] = torch.cat([grad_r, grad_z, grad_n], 1)
        grad_sums[t] = torch.cat([grad_r, grad_z, grad_n * r], 1)
        decided = (hidden if hidden_weight is None else hidden[t], scores[t], gates[t], indices[t])
        through_product, grad_scores[t], grad_hidden_t = state_product_backward(
            grad_sums[t], before[t], weight, gate_weight, hidden_weight, decided, key, block, selection, normalise
        )
        if grad_hidden_t is not None:
            grad_hidden[t] = grad_hidden_t
        grad_h = through_product + grad_h * z
    grad_weight = weight_gradient(grad_sums, before, weight, gates, indices, block, need_weight)
    return grad_projected, grad_h, grad_sums, grad_weight, grad_scores, grad_hidden
