"""Modules with parameters: what a user puts into a model."""

from blockgate.layers.linear import DynamicSparseLinear
from blockgate.layers.pack import pack
from blockgate.layers.packed import PackedDynamicSparseLinear, PackedLinear

__all__ = ["DynamicSparseLinear", "PackedDynamicSparseLinear", "PackedLinear", "pack"]
