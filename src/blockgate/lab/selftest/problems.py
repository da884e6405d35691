"""Problems for the library: drawn from a seed, boundary shapes first."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LAYERS", "Problem", "draw", "smaller"]

LAYERS = ("linear", "conv1d", "lstm", "cell", "qrnn", "screened", "gru", "gru_cell", "mlp")
STACKS, CELLS = ("lstm", "gru"), ("cell", "gru_cell")
RECURRENT = (*STACKS, *CELLS, "qrnn")
# How values are drawn: of unit scale; over many powers of two; small whole numbers, full of ties; mostly zeros; all at
# the ends of what integer formats hold; of the size that overflows squares; with NaN and infinity in some place; scores
# in pairs that differ by a rounding.
VALUES = (
    "normal",
    "wide",
    "whole",
    "sparse",
    "extreme",
    "huge",
    "tiny",
    "bad_input",
    "bad_state",
    "bad_weight",
    "bad_gate",
    "twins",
)
BAD = ("bad_input", "bad_state", "bad_weight", "bad_gate")
KINDS = ("margin", "topk", "eq1", "softmax_sum", "sigmoid", "norm")
FORMATS = ("float32", "bfloat16", "int8", "int8a8", "int4", "float16")
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")
MOST_HEADS = 100
# Around the sizes of panels (16), vectors (8, 16), pairs, groups (32) and tiles (6 rows, 64 outputs).
SIZES = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 47, 48, 49, 63, 64, 65, 80, 100)
BLOCKS = (1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 20, 31, 32, 33, 48, 64, 100, 1 << 40)
ROWS = (0, 1, 1, 2, 3, 5, 6, 7, 8, 11, 12, 13, 16, 17, 24, 31, 32, 33)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One layer with its values, its input and the way it is called. All that it is follows from these fields."""

    seed: int = 0
    layer: str = "linear"
    values: str = "normal"
    dtype: str = "float32"
    autocast: str = ""
    out: int = 8
    inputs: int = 8
    block: tuple[int, int] = (4, 4)
    rows: int = 2
    steps: int = 1
    layers: int = 1
    ragged: bool = False
    bidirectional: bool = False
    window: int = 2
    pooling: str = "fo"
    channels: int = 24
    activation: str = "gelu"
    glu: bool = False
    bias: bool = True
    kind: str = "margin"
    normalise: str = ""
    select: str = ""
    near_dense: bool = False
    sparsity: float = 0.5
    key_size: int = 0
    key_offset: int = 0
    hidden: int = 0
    training: bool = False
    backend: str = "auto"
    formats: tuple[str, ...] = ()
    threads: int = 1
    strided: bool = False

    @property
    def is_bad(self) -> bool:
        """Whether it has NaN or infinity in it."""
        return self.values in BAD

    @property
    def is_recurrent(self) -> bool:
        """Whether its layer carries a state."""
        return self.layer in RECURRENT

    @property
    def is_stack(self) -> bool:
        """Whether its layer is called as torch's recurrent layers are."""
        return self.layer in STACKS

    @property
    def is_cell(self) -> bool:
        """Whether its layer is one step."""
        return self.layer in CELLS

    @property
    def directions(self) -> int:
        """In how many directions sequences are read."""
        return 2 if self.bidirectional else 1

    def options(self) -> dict[str, Any]:
        """The options of the layer's gates."""
        if self.kind == "norm":
            return {"block_size": self.block, "sparsity": self.sparsity, "gate": "norm", "backend": self.backend}
        given: dict[str, Any] = {
            "block_size": self.block[0] if self.layer == "mlp" else self.block,
            "sparsity": self.sparsity,
            "gate": self.kind,
            "key_size": self.key_size or None,
            "key_offset": self.key_offset,
            "near_dense": self.near_dense,
            "backend": self.backend,
        }
        for name, value in {"normalise": self.normalise, "select": self.select, "gate_hidden": self.hidden}.items():
            if value:
                given[name] = value
        return given

    def __str__(self) -> str:
        default = Problem()
        told = (f"{f.name}={v!r}" for f in fields(self) if (v := getattr(self, f.name)) != getattr(default, f.name))
        return f"Problem({', '.join(told)})"


def _boundaries() -> list[dict[str, Any]]:
    """Shapes at the edges of what kernels handle, for every layer that has them."""
    found: list[dict[str, Any]] = []
    for out, inputs in itertools.product((1, 15, 16, 17, 33), repeat=2):
        found += [{"out": out, "inputs": inputs, "rows": rows} for rows in (0, 1, 2, 7)]
    for block in ((1, 1), (1, 64), (64, 1), (16, 4), (64, 8), (1 << 40, 1 << 40), (16, 16), (17, 3), (33, 32)):
        found += [{"out": 70, "inputs": 49, "block": block, "rows": rows} for rows in (1, 6, 13)]
    # Many inputs in one sum of integers; enough work for several threads.
    found += [{"out": 16, "inputs": 1100, "block": (16, 1 << 40), "values": "extreme", "rows": r} for r in (1, 9)]
    found += [{"out": 256, "inputs": 300, "block": (64, 50), "rows": 40, "threads": t} for t in (1, 2, 3)]
    for out, inputs in itertools.product((1, 16, 17), repeat=2):
        # A Quasi-RNN refuses a batch of none.
        found += [{"layer": "lstm", "out": out, "inputs": inputs, "rows": rows} for rows in (0, 1, 7)]
        found += [{"layer": "cell", "out": out, "inputs": inputs, "rows": rows} for rows in (0, 1, 7)]
        found += [{"layer": "qrnn", "out": out, "inputs": inputs, "rows": rows} for rows in (1, 7)]
        found += [{"layer": "gru", "out": out, "inputs": inputs, "rows": rows} for rows in (0, 1, 7)]
        found += [{"layer": "gru_cell", "out": out, "inputs": inputs, "rows": rows} for rows in (0, 7)]
        found += [{"layer": s, "out": out, "inputs": inputs, "rows": 2, "bidirectional": True} for s in STACKS]
    for out, rows in itertools.product((1, 17), (0, 1, 16, 17)):
        found += [{"layer": "mlp", "out": out, "inputs": 33, "rows": rows, "formats": FORMATS}]
    for out, rows in itertools.product((1, 16, 33, 128, 129, 150), (1, 4, 5)):
        found += [{"kind": "norm", "out": out, "inputs": 40, "block": (1 << 40, 1), "rows": rows, "formats": FORMATS}]
    found += [{"layer": "screened", "out": out, "inputs": n, "rows": 2} for out in (1, 17, 300) for n in (1, 33)]
    return found


BOUNDARIES = _boundaries()


def draw(seed: int) -> Problem:
    """The problem of a seed: the first ones have boundary shapes."""
    random = np.random.default_rng([21, seed])

    def one(values: Any, weights: Any = None) -> Any:
        return (
            values[int(random.choice(len(values), p=weights))] if weights else values[int(random.integers(len(values)))]
        )

    layer = one(LAYERS, (0.53, 0.08, 0.1, 0.03, 0.07, 0.04, 0.07, 0.03, 0.05))
    recurrent = layer in RECURRENT
    sizes = [size for size in SIZES if size <= 33] if recurrent else SIZES
    out, inputs = one(sizes), one(sizes)
    block, rows, threads = (one(BLOCKS), one(BLOCKS)), one(ROWS), 1
    values = one(VALUES, (0.43, 0.09, 0.1, 0.03, 0.1, 0.03, 0.03, 0.05, 0.03, 0.04, 0.02, 0.05))
    if recurrent and random.random() < 0.04:
        # Enough work for several threads, in few steps.
        out, inputs, threads = one((64, 96, 130)), one((64, 100)), one((1, 2, 3))
        block = (one((16, 48, 64)), one((8, 16, 33)))
    if not recurrent and random.random() < 0.02:
        # Enough work for several threads.
        out, inputs, rows, threads = one((200, 256, 300)), one((130, 256, 300)), one((24, 65, 130)), one((1, 2, 3))
        block = (one((16, 48, 64, 256)), one((8, 16, 33, 64)))
    drawn: dict[str, Any] = {}
    if seed < len(BOUNDARIES):
        drawn = BOUNDARIES[seed]
        layer = drawn.get("layer", "linear")
        recurrent = layer in RECURRENT
        values = one(("normal", "extreme", "whole"))
    out, inputs = drawn.get("out", out), drawn.get("inputs", inputs)
    block, rows, values = drawn.get("block", block), drawn.get("rows", rows), drawn.get("values", values)
    if recurrent and "rows" not in drawn:
        rows = max(1, min(rows, 8))
    if values == "bad_state" and layer not in {*STACKS, *CELLS}:
        values = "bad_input"
    dtype = one(("float32", "float64", "float16", "bfloat16"), (0.78, 0.12, 0.05, 0.05))
    if values in {"huge", "tiny"}:
        dtype = "float64"
    if layer == "conv1d" and dtype != "float64":
        dtype = "float32"
    kind = drawn.get("kind", one(KINDS, (0.47, 0.26, 0.06, 0.06, 0.06, 0.09)))
    if kind == "norm" and "block" not in drawn and random.random() < 0.6:
        # Single columns, which are packed as such.
        block = (block[0], 1)
    autocast = one(("", "bfloat16", "float16"), (0.92, 0.05, 0.03))
    read = hidden_inputs(layer, inputs, out)
    key_size = one((0, 0, read, int(random.integers(1, read + 1))))
    problem = Problem(
        seed=seed,
        layer=layer,
        values=values,
        dtype=dtype,
        autocast=autocast if dtype == "float32" and values == "normal" else "",
        out=out,
        inputs=inputs,
        block=block,
        rows=rows,
        steps=int(random.integers(1, 5)) if layer in {*STACKS, "qrnn"} else 1,
        layers=one((1, 1, 2)) if layer in {*STACKS, "qrnn"} else 1,
        ragged=layer in STACKS and random.random() < 0.35,
        bidirectional=drawn.get("bidirectional", layer in STACKS and random.random() < 0.3),
        window=one((1, 2)),
        pooling=one(("f", "fo")),
        channels=one(SIZES) if layer == "mlp" else 24,
        activation=one(ACTIVATIONS) if layer == "mlp" else "gelu",
        glu=layer == "mlp" and random.random() < 0.5,
        bias=random.random() < 0.8,
        kind=kind,
        normalise=one(("mean", "rms", "none", "")) if kind == "topk" else "",
        select=one(("per_row", "global", "")) if kind in {"topk", "margin"} else "",
        near_dense=random.random() < 0.2,
        sparsity=0.0 if kind == "sigmoid" else one((0.0, 0.25, 0.5, 0.5, 0.75, 0.9, 0.99)),
        key_size=key_size,
        key_offset=int(random.integers(0, read - key_size + 1)) if key_size else 0,
        hidden=one((0, 0, 0, 1, 5, 16)),
        training=random.random() < 0.3,
        backend=one(("auto", "reference"), (0.9, 0.1)),
        formats=drawn.get("formats", tuple(f for f in FORMATS[:-1] if random.random() < 0.5)),
        threads=drawn.get("threads", threads),
        strided=random.random() < 0.1,
    )
    # Drawn last, as it came last: seeds that stand in results keep their problems.
    if "formats" not in drawn and random.random() < 0.5:
        problem = replace(problem, formats=(*problem.formats, FORMATS[-1]))
    return _possible(problem)


def hidden_inputs(layer: str, inputs: int, out: int) -> int:
    """The fewest features that any gate of a layer can read; of an LSTM also those of its state."""
    return min(inputs, out) if layer in RECURRENT else inputs


def _possible(problem: Problem) -> Problem:
    """With options that exclude each other taken out."""
    if problem.is_cell:
        problem = replace(problem, formats=())
    if problem.dtype != "float32":
        problem = replace(problem, formats=())
    if (problem.is_stack or problem.is_cell) and problem.dtype in {"float16", "bfloat16"}:
        # What stays inside of a recurrence is not rounded, and can't be seen: so one step, whose state is given.
        problem = replace(problem, steps=1, ragged=False)
    if problem.kind == "norm":
        problem = replace(problem, normalise="", select="", hidden=0, key_size=0, key_offset=0, near_dense=False)
        if problem.values in {"bad_weight", "bad_gate", "huge", "tiny"}:
            # It has no network; the norm of a bad column is that of its whole row of blocks.
            problem = replace(problem, values="bad_input" if problem.is_bad else "normal")
    if problem.layer == "qrnn" and problem.values in {"bad_weight", "bad_gate"}:
        problem = replace(problem, values="bad_input")
    if problem.layer == "screened":
        problem = replace(problem, kind="margin", dtype="float32", autocast="", formats=(), backend="auto")
        if problem.values in {"bad_state", "bad_weight", "bad_gate", "huge", "tiny"}:
            problem = replace(problem, values="normal")
    if problem.layer == "mlp":
        kind = "margin" if problem.kind == "norm" else problem.kind
        # What is infinite may be made finite by an activation.
        values = "normal" if problem.is_bad or problem.values in {"huge", "tiny"} else problem.values
        problem = replace(problem, kind=kind, select="", values=values)
    if problem.kind == "softmax_sum" and problem.layer != "linear":
        problem = replace(problem, training=False)
    if problem.values == "wide":
        # Some of these values are above the range of float16.
        problem = replace(problem, formats=tuple(f for f in problem.formats if f != "float16"))
        if problem.dtype == "float16":
            problem = replace(problem, values="normal")
    if problem.values in {"huge", "tiny"} and problem.kind in {"sigmoid", "softmax_sum"}:
        # A softmax of such scores hangs on their last bits alone.
        problem = replace(problem, values="normal")
    if problem.kind == "softmax_sum":
        cells = -(-problem.out // problem.block[0]) * -(-problem.inputs // problem.block[1])
        if cells > MOST_HEADS:
            # Each head has a score for each block.
            problem = replace(problem, sparsity=0.99)
        if cells > 10 * MOST_HEADS:
            problem = replace(problem, kind="topk")
    if problem.is_bad:
        problem = replace(problem, training=False, dtype="float32", autocast="", near_dense=False)
    return problem


def smaller(problem: Problem) -> Iterator[Problem]:
    """Problems a little simpler than this one, the simplest first: for minimal reproductions."""
    default = Problem(seed=problem.seed)
    for field in fields(problem):
        value, simple = getattr(problem, field.name), getattr(default, field.name)
        if field.name in {"seed", "layer", "values", "dtype"} or value == simple:
            continue
        yield replace(problem, **{field.name: simple})
        if isinstance(value, int) and not isinstance(value, bool) and value > 1:
            less: list[dict[str, Any]] = [{field.name: value // 2}, {field.name: value - 1}]
            yield from (replace(problem, **change) for change in less)
        if field.name == "formats" and len(value) > 1:
            yield from (replace(problem, formats=(name,)) for name in value)
