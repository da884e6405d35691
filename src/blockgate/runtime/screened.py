"""Output layers that find their largest scores without computing most of them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn

from blockgate.errors import invalid
from blockgate.ops.native import unavailable_reason
from blockgate.ops.screened_topk import (
    count_survivors,
    make_screen,
    prepare_screened,
    release_screened,
    run_screened_rank,
    run_screened_topk,
    screened_rank,
    screened_topk,
)
from blockgate.runtime.block_linear import check_rows
from blockgate.runtime.follow import Followed

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LargestScores", "ScreenedLinear"]


class LargestScores(NamedTuple):
    """What `ScreenedLinear.topk` returns: (..., k) each."""

    values: Tensor
    indices: Tensor


class ScreenedLinear(nn.Linear):
    """nn.Linear that also finds its k largest outputs exactly, at the cost of reading about half a byte a weight.

    A scan of 4-bit codes bounds every output; only those that could be among the k largest are computed, from the
    float32 weight. Where more than a quarter of them could, all are. `forward` is nn.Linear's own. For inference; made
    by `pack(model, screened=...)`.

    Outputs that are compared are float64 sums, rounded to float32: the same bits on every machine. They come by falling
    value, equal ones by rising index. NaN or inf in an input makes its values NaN and its indices 0 to k - 1.

    Args:
        weight: (out_features, in_features); copied as float32.
        bias: (out_features) or None; copied.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        _check_finite(weight, bias)
        # Never inference tensors, of which nobody could tell whether they have changed.
        with torch.inference_mode(False):
            self.weight = nn.Parameter(weight.detach().float().clone(), requires_grad=False)
            if bias is not None:
                self.bias = nn.Parameter(bias.detach().float().clone(), requires_grad=False)
        self._screen: Followed[_Prepared] = Followed()

    def topk(self, x: Tensor, k: int) -> LargestScores:
        """The k largest outputs (..., k) for x (..., in_features), and their indices."""
        self._check_k(k)
        values, indices = self._prepared().topk(self._rows(x), k)
        shape = (*x.shape[:-1], k)
        return LargestScores(values.view(shape), indices.view(shape))

    def rank(self, x: Tensor, targets: Tensor) -> Tensor:
        """How many outputs come before each of targets (...) for x (..., in_features); out_features where x has NaN."""
        if targets.shape != x.shape[:-1] or targets.is_floating_point():
            raise invalid(
                "targets",
                expected=f"whole numbers of shape {tuple(x.shape[:-1])}",
                got=f"{targets.dtype} of shape {tuple(targets.shape)}",
                remedy="Give one output's number for each row of the input.",
            )
        if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < self.out_features:
            raise invalid(
                "targets",
                expected=f"numbers from 0 to {self.out_features - 1}",
                got=f"{int(targets.min())} to {int(targets.max())}",
                remedy="Leave padding out.",
            )
        return self._prepared().rank(self._rows(x), targets.reshape(-1)).view(targets.shape)

    def count_survivors(self, x: Tensor, k: int) -> Tensor:
        """How many outputs (...) `topk` computes for x (..., in_features). Native kernels and a CPU only."""
        self._check_k(k)
        return cast("Tensor", count_survivors(self._rows(x), self._prepared().handle, k)).view(x.shape[:-1])

    @property
    def scanned_bytes(self) -> int:
        """What a scan reads."""
        return sum(t.numel() * t.element_size() for t in self._prepared().screen)

    def train(self, mode: bool = True) -> Self:  # noqa: ARG002
        """Stays in eval mode, as packed layers do."""
        return super().train(False)

    def _check_k(self, k: object) -> None:
        if type(k) is not int or not 1 <= k <= self.out_features:
            raise invalid(
                "k",
                expected=f"a whole number from 1 to out_features, {self.out_features}",
                got=k,
                remedy="Ask for fewer outputs.",
            )

    def _prepared(self) -> _Prepared:
        parameters = [p for p in (self.weight, self.bias) if p is not None]
        made = self._screen.get((self.weight, self.bias), lambda: parameters, lambda: _Prepared(self.weight, self.bias))
        return cast("_Prepared", made)

    def _rows(self, x: Tensor) -> Tensor:
        check_rows(x, self.in_features)
        if x.device != self.weight.device:
            raise invalid(
                "input",
                expected=f"a tensor on {self.weight.device}, as the layer's weight",
                got=str(x.device),
                remedy="Move the input or the layer with .to(device).",
            )
        return x.detach().reshape(-1, self.in_features).float()


class _Prepared:
    """The screen of a weight and bias, prepared for native calls where there are any."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        _check_finite(weight, bias)
        weight, bias = weight.detach().float(), None if bias is None else bias.detach().float()
        self.screen = make_screen(weight, bias)
        self.layer = (weight, bias, *self.screen)
        self.handle: int | None = None
        if weight.is_cpu and unavailable_reason() is None:
            self.handle = prepare_screened(*self.layer)
            weakref.finalize(self, release_screened, self.handle).atexit = False

    def topk(self, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest scores of rows (N, n), and their numbers."""
        if self.handle is None or torch.compiler.is_compiling():
            return screened_topk(rows, *self.layer, k)  # type: ignore[no-any-return]
        return run_screened_topk(rows, self.handle, k)  # type: ignore[no-any-return]

    def rank(self, rows: Tensor, targets: Tensor) -> Tensor:
        """The ranks of targets (N,) for rows (N, n)."""
        if self.handle is None or torch.compiler.is_compiling():
            return screened_rank(rows, targets, *self.layer)  # type: ignore[no-any-return]
        return run_screened_rank(rows, targets, self.handle)  # type: ignore[no-any-return]


def _check_finite(weight: Tensor, bias: Tensor | None) -> None:
    """Refuses what has no order."""
    if not weight.is_floating_point() or not bool(weight.isfinite().all()):
        raise invalid(
            "weight",
            expected="finite floating numbers",
            got="NaN or inf" if weight.is_floating_point() else weight.dtype,
            remedy="Look for what went wrong in training.",
        )
    if bias is not None and bool(bias.isnan().any()):
        raise invalid("bias", expected="numbers", got="NaN", remedy="Look for what went wrong in training.")
