"""The dropouts that recurrent language models are trained with: locked, of whole words, and of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockgate.errors import invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DropoutEmbedding", "LockedDropout", "check_share", "is_hooked", "weight_drop_"]


def check_share(name: str, share: float) -> float:
    """Returns `share` if it can be the share of values that a dropout zeroes."""
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1:
        raise invalid(name, expected="a share in [0, 1)", got=share, remedy="0 switches it off.")
    return float(share)


class LockedDropout(nn.Module):
    """Variational dropout (Gal and Ghahramani, 2016): one mask for all steps of a sequence.

    Args:
        p: share of features dropped.
        batch_first: whether the input is (N, T, F) instead of (T, N, F).
    """

    def __init__(self, p: float = 0.5, batch_first: bool = False) -> None:
        super().__init__()
        self.p = check_share("p", p)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        """x (T, N, F), or unbatched (T, F), with the same features dropped at every step; in eval as it is."""
        if not self.training or not self.p:
            return x
        time = 1 if self.batch_first and x.dim() == 3 else 0
        like = x.narrow(time, 0, 1)
        return x * F.dropout(torch.ones_like(like), self.p)

    def extra_repr(self) -> str:
        """For print(model)."""
        return f"p={self.p}, batch_first={self.batch_first}"


class DropoutEmbedding(nn.Embedding):
    """nn.Embedding that drops whole words in training: a word is gone, or stays, in the whole batch.

    Args:
        num_embeddings: size of the vocabulary.
        embedding_dim: size of a word's vector.
        p: share of the words dropped.
        options: those of nn.Embedding.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, p: float = 0.1, **options: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, **options)
        self.p = check_share("p", p)

    def forward(self, words: Tensor) -> Tensor:
        """Vectors (..., embedding_dim) of words (...)."""
        vectors = super().forward(words)
        if not self.training or not self.p:
            return vectors
        kept = F.dropout(torch.ones(self.num_embeddings, device=vectors.device, dtype=vectors.dtype), self.p)
        return vectors * kept[words].unsqueeze(-1)

    def extra_repr(self) -> str:
        """For print(model)."""
        return f"{super().extra_repr()}, p={self.p}"


def weight_drop_(module: nn.Module, names: str | Sequence[str], p: float = 0.5) -> nn.Module:
    """Drops entries of weights at every training step (DropConnect; Merity et al., 2017), in place.

    The parameters stay what and where they are, so optimizers, checkpoints and `pack` see nothing of it: only while
    `module` computes in training mode do copies with dropped entries stand in for them.

    Args:
        module: the module that owns the weights, such as an LSTM, or a filter of a QRNN.
        names: of its weights to drop from, such as "weight_hh_l0".
        p: share of entries dropped. A second call for the same weight sets a new share; 0 takes it off.

    Returns:
        `module`.
    """
    check_share("p", p)
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if not isinstance(module._parameters.get(name), nn.Parameter):
            raise invalid(
                "weight_drop_",
                expected=f"names of parameters of {type(module).__name__}: {sorted(module._parameters)}",
                got=name,
                remedy="Call it on the module that owns the weight.",
            )
    drop = next((h for h in module._forward_pre_hooks.values() if isinstance(h, _WeightDrop)), None)
    if drop is None:
        drop = _WeightDrop()
        module.register_forward_pre_hook(drop)
        module.register_forward_hook(_unshadow, always_call=True)
    drop.shares.update(dict.fromkeys(names, p))
    return module


def is_hooked(module: nn.Module) -> bool:
    """Whether forward hooks of others watch or change what `module` computes in eval mode."""
    before = [hook for hook in module._forward_pre_hooks.values() if not isinstance(hook, _WeightDrop)]
    after = [hook for hook in module._forward_hooks.values() if hook is not _unshadow]
    return bool(before or after)


class _WeightDrop:
    """A forward pre-hook that shadows parameters with dropped copies; `_unshadow` takes them away afterwards."""

    def __init__(self) -> None:
        self.shares: dict[str, float] = {}

    def __call__(self, module: nn.Module, args: Any) -> None:  # noqa: ARG002
        if not module.training:
            return
        # Attributes of the instance are found before parameters, which stay registered, and in their order.
        for name, share in self.shares.items():
            if share:
                module.__dict__[name] = F.dropout(module._parameters[name], share)  # type: ignore[arg-type]
        _follow_names(module)


def _unshadow(module: nn.Module, *_: Any) -> None:
    for name in module._parameters:
        module.__dict__.pop(name, None)
    _follow_names(module)


def _follow_names(module: nn.Module) -> None:
    """torch's recurrent layers read their weights from a list instead of by name."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
