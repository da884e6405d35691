"""Modules with parameters: what a user puts into a model."""

from blockgate.layers.linear import DynamicSparseLinear

__all__ = ["DynamicSparseLinear"]
