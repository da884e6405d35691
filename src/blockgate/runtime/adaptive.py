"""The likeliest words of an adaptive softmax in one native call, without the groups that hold none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockgate.ops.packed_linear import run_prepared_adaptive
from blockgate.runtime.packed import PackedLinear
from blockgate.runtime.plan import memory_refusal
from blockgate.runtime.prepared import PreparedLinear

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

__all__ = ["likeliest_in_one_call"]


def likeliest_in_one_call(
    decoder: nn.Module, group_weight: Tensor, group_bias: Tensor, bounds: Sequence[int], x: Tensor, k: int
) -> tuple[Tensor, Tensor] | None:
    """Values and numbers (N, k) of the likeliest words for x (N, features); None where no native call can find them.

    Words come by falling value, equal ones by rising number. NaN or inf in a row of x makes its values NaN and its
    numbers 0 to k - 1.

    Args:
        decoder: packed by `pack`, without gates or hooks: a score for every word.
        group_weight: (groups, features).
        group_bias: (groups).
        bounds: where each group of rare words begins, and the number of words.
        x: (N, features).
        k: from 1 to the number of words.
    """
    if type(decoder) is not PackedLinear or decoder._forward_pre_hooks or decoder._forward_hooks or x.dim() != 2:
        return None
    prepared = decoder._fused(x)
    if type(prepared) is not PreparedLinear or not prepared.fits(x) or not 1 <= k <= prepared.out_features:
        return None
    if memory_refusal((group_weight, group_bias)) is not None:
        return None
    return run_prepared_adaptive(x, prepared.handle, group_weight, group_bias, bounds, k)  # type: ignore[no-any-return]
