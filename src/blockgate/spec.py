"""Every option of a gated layer, once: its default, its check, its words, its form in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import EllipsisType
from typing import Any, Literal, TypedDict

from blockgate.errors import InvalidInputError, invalid
from blockgate.grid import BlockGrid, as_int, check_size, check_sparsity
from blockgate.ops import NORMALISE, check_backend

__all__ = ["DEFAULT_KEY_SIZE", "SELECT", "GateOptions", "GateSpec"]

# How many features a gate reads at most where nothing is said.
DEFAULT_KEY_SIZE = 128

SELECT = ("global", "per_row")


class GateOptions(TypedDict, total=False):
    """The fields of `GateSpec` as keyword arguments, for the constructors that take them."""

    block_size: int | tuple[int, int]
    sparsity: float
    key_size: int | Literal["auto"] | EllipsisType | None
    key_offset: int
    gate_hidden: int | None
    gate: str | None
    normalise: str | None
    select: str | None
    near_dense: bool
    backend: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GateSpec:
    """How a weight matrix is cut into blocks, and how its gate decides which of them open.

    One spec serves matrices of any size: what depends on the size, such as the key, is worked out by the gate.
    """

    block_size: int | tuple[int, int] = (256, 16)
    """(out, in), or one int for square blocks. Kept as (out, in). Tall thin blocks choose inputs more finely than
    square ones of the same area, at the same cost of the gate."""
    sparsity: float = 0.5
    """The share of blocks that stay closed, in [0, 1). `layer.sparsity` changes it at any time."""
    key_size: int | Literal["auto"] | None = "auto"
    """How many input features the gate reads. "auto" (or unset): at most 128; None: all of them."""
    key_offset: int = 0
    """The first feature the gate reads."""
    gate_hidden: int | None = None
    """Width of a hidden ReLU layer in the gate; None for none, as in the paper."""
    gate: str | None = None
    """"margin", "topk", "eq1" (the paper's: topk with mean and global), "norm" (no parameters), "softmax_sum",
    "sigmoid", or one of yours. If unset, margin; or topk if `normalise` is given, which is an option of topk only."""
    normalise: str | None = None
    """For topk, what the gates are scaled to: "rms" 1 (the default), "mean" 1, or "none"."""
    select: str | None = None
    """For margin and topk: "per_row" opens the same number in every row of blocks, "global" chooses among all.
    If unset, "per_row" where rows have at least 4 blocks, else "global"."""
    near_dense: bool = False
    """Whether gates start near 1, for weights that were trained without gates; `from_dense` and `sparsify_` set it."""
    backend: str = "auto"
    """Which code computes: "auto", "reference", "cpu" or "triton"; a named one that can't run raises."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", BlockGrid(1, 1, self.block_size).block)
        object.__setattr__(self, "sparsity", check_sparsity(self.sparsity))
        if isinstance(self.key_size, EllipsisType):
            object.__setattr__(self, "key_size", "auto")
        for name in ("key_size", "key_offset"):
            # NumPy's integers become Python's; what is no integer is judged with the input's size.
            if (number := as_int(getattr(self, name))) is not None:
                object.__setattr__(self, name, number)
        if self.gate_hidden is not None:
            object.__setattr__(self, "gate_hidden", check_size("gate_hidden", self.gate_hidden))
        if self.gate is None:
            object.__setattr__(self, "gate", "margin" if self.normalise is None else "topk")
        if not isinstance(self.gate, str):
            raise invalid("gate", expected="the name of a kind of gate", got=self.gate, remedy="Leave it unset.")
        if self.normalise is not None and self.normalise not in NORMALISE:
            raise invalid(
                "normalise", expected=f"one of {NORMALISE}", got=self.normalise, remedy="The paper uses 'mean'."
            )
        if self.select is not None and self.select not in SELECT:
            raise invalid("select", expected=f"one of {SELECT}", got=self.select, remedy="The paper uses 'global'.")
        if not isinstance(self.near_dense, bool):
            raise invalid("near_dense", expected="True or False", got=self.near_dense, remedy="The default is False.")
        check_backend(self.backend)

    @classmethod
    def of(cls, base: GateSpec | None, options: Mapping[str, Any]) -> GateSpec:
        """The spec of a layer: `base`, or the defaults, with the given options in their place."""
        if base is not None and not isinstance(base, cls):
            raise invalid("spec", expected="a GateSpec", got=base, remedy="Pass the options as keyword arguments.")
        names = [field.name for field in fields(cls)]
        for name in options:
            if name not in names:
                remedy = "Check the spelling; device and dtype are no options of a gate."
                raise invalid("option", expected=f"one of {tuple(names)}", got=name, remedy=remedy)
        return cls(**options) if base is None else replace(base, **options)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GateSpec:
        """The spec that `to_json` described; options that are left out have their defaults."""
        options = dict(data)
        if isinstance(options.get("block_size"), list):
            options["block_size"] = tuple(options["block_size"])
        return cls.of(None, options)

    def to_json(self) -> dict[str, Any]:
        """The options as JSON knows them, without the backend, which belongs to a machine."""
        data = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "backend"}
        return data | {"block_size": list(data["block_size"])}

    def grid(self, out_features: int, in_features: int) -> BlockGrid:
        """The cut of a weight (out_features, in_features)."""
        return BlockGrid(out_features, in_features, self.block_size)

    def key(self, in_features: int) -> tuple[int, int]:
        """Offset and size of the key in an input of this size, or a clear error if it doesn't fit."""
        offset = as_int(self.key_offset)
        if offset is None or not 0 <= offset < in_features:
            raise _out_of_input("key_offset", f"an int from 0 to {in_features - 1}", self.key_offset)
        rest = in_features - offset
        if self.key_size is None:
            return offset, rest
        if self.key_size == "auto":
            return offset, min(DEFAULT_KEY_SIZE, rest)
        size = as_int(self.key_size)
        if size is None or not 0 < size <= rest:
            expected = f"an int from 1 to {rest} (in_features {in_features} - key_offset {offset})"
            raise invalid("key_size", expected=expected, got=self.key_size, remedy="Pass None to read the whole input.")
        return offset, size


def _out_of_input(what: str, expected: str, got: object) -> InvalidInputError:
    return invalid(what, expected=expected, got=got, remedy="It must lie in the input.")
