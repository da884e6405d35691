"""The gated form of Hugging Face's Conv1D: a linear layer whose weight is stored as (in_features, out_features)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from blockgate.errors import invalid
from blockgate.layers.linear import DynamicSparseLinear

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DynamicSparseConv1D", "huggingface_conv1d", "stores_transposed"]


def huggingface_conv1d() -> type[nn.Module] | None:
    """`transformers.pytorch_utils.Conv1D` if transformers is loaded; a model without it has no such layer."""
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


def stores_transposed(layer: object) -> bool:
    """Whether the weight of a linear layer is stored as (in_features, out_features)."""
    return isinstance(layer, DynamicSparseConv1D) or type(layer) is huggingface_conv1d()


class DynamicSparseConv1D(DynamicSparseLinear):
    """Drop-in for Hugging Face's Conv1D, as in GPT-2: `DynamicSparseLinear` with its weight stored transposed.

    `weight` is (in_features, out_features), so that the checkpoints of the dense model load. Args as in
    `DynamicSparseLinear`.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **options: Any) -> None:
        super().__init__(in_features, out_features, bias, **options)
        self.weight = nn.Parameter(self.weight.detach().t().contiguous())

    @classmethod
    def from_dense(cls, linear: nn.Module, **options: Any) -> Self:
        """A gated layer around a trained Conv1D: the same Parameter objects, and gates that start near 1."""
        if type(linear) is not huggingface_conv1d():
            raise invalid(
                "from_dense", expected="a Conv1D of transformers", got=type(linear).__name__, remedy="Pass the layer."
            )
        weight, bias = cast("nn.Parameter", linear.weight), cast("nn.Parameter", linear.bias)
        # An nn.Linear without memory stands in for the layer; the parameters are then the layer's own.
        stand_in = nn.Linear(weight.shape[0], weight.shape[1], device="meta", dtype=weight.dtype).train(linear.training)
        made = super().from_dense(stand_in, **{"device": weight.device, **options})
        made.weight, made.bias = weight, bias
        return made

    def _matrix(self) -> Tensor:
        return self.weight.t()
