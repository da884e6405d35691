"""The kinds of weight matrices that a model can be built of: an entry of MATRICES makes a kind known to all models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from blockgate.layers import QRNN, DynamicSparseLinear, DynamicSparseLSTM, DynamicSparseQRNN

__all__ = ["MATRICES", "Matrices"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrices:
    """Makers of layers with one kind of matrices.

    Each takes the arguments of the dense layer; `options` makes the keyword options that come in addition from the
    config of the gates, of which other kinds use what they need, such as block_size and sparsity.
    """

    linear: Callable[..., nn.Module]
    lstm: Callable[..., nn.Module]
    qrnn: Callable[..., nn.Module]
    options: Callable[[Any], dict[str, Any]]


# Other kinds register themselves, each in its own file.
MATRICES: dict[str, Matrices] = {
    "dense": Matrices(linear=nn.Linear, lstm=nn.LSTM, qrnn=QRNN, options=lambda _: {}),
    "dynamic": Matrices(
        linear=DynamicSparseLinear,
        lstm=DynamicSparseLSTM,
        qrnn=DynamicSparseQRNN,
        options=lambda spec: {"spec": spec},
    ),
}
