"""Faults that are made in the kernels on purpose, each with the check that has to notice it.

The interpreter works in the process's own memory: a fault that wrote outside of tensors would end the process.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from blockgate.grid import BlockGrid
from tests.triton import checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OPS = "blockgate.ops"
TOPK, POOL, LSTM = f"{OPS}.topk_gates.triton", f"{OPS}.forget_pool.triton", f"{OPS}.gated_lstm.triton"
GRU, STEPS = f"{OPS}.gated_gru.triton", f"{OPS}.gated_lstm.triton_steps"
LINEAR, ROWS = f"{OPS}.gated_linear.triton", f"{OPS}.gated_linear.triton_rows"
SCORES = f"{OPS}.gate_scores.triton"
LISTS, TILES = f"{OPS}.gated_linear.triton_lists", f"{OPS}.gated_linear.triton_tiles"
MODULES = (TOPK, POOL, LSTM, GRU, STEPS, LINEAR, ROWS, LISTS, TILES, SCORES, f"{OPS}.packed_linear.triton")


def select(rule: str) -> Callable[[], None]:
    return lambda: checks.check_selection([(2, 3, 5)], (rule,))


def multiply(rows: int, m: int = 20, n: int = 26, block: tuple[int, int] = (8, 9)) -> Callable[[], None]:
    return lambda: checks.compare_linear(*checks.problem(rows, BlockGrid(m, n, block), 5), block)


def small_lstm() -> None:
    checks.check_lstm(((0, "margin"),))


def small_shared() -> None:
    checks.check_shared((3,), (3,))


def small_gru() -> None:
    checks.check_gru(((0, "margin"),))


class Fault(NamedTuple):
    name: str
    module: str
    right: str
    wrong: str
    check: Callable[[], None]
    slow: bool = False


FAULTS = [
    Fault("one of equal scores is lost", TOPK, "<= missing[:, None]", "< missing[:, None]", select("rms")),
    Fault("the last score of a group", TOPK, "& (column < size)", "& (column < size - 1)", select("margin")),
    Fault(
        "negative scores in reverse", TOPK, "tl.where(negative, ~bits,", "tl.where(negative, bits,", select("margin")
    ),
    Fault(
        "another of the lowest scores",
        TOPK,
        "column, 0), 1)\n        thr",
        "column + 1, 0), 1)\n        thr",
        select("margin"),
        slow=True,
    ),
    Fault("mean for rms", TOPK, "unit * unit, before * before", "unit, before", select("rms")),
    Fault("no unit for the sum", TOPK, "total * before + tl.sum(unit)", "total + tl.sum(value)", select("mean")),
    Fault("a gradient for closed gates", TOPK, "kept & (value != 0), slope", "kept, slope", select("none")),
    Fault("the floor is missing", TOPK, "(threshold - floor)", "threshold", select("margin_near_dense")),
    Fault(
        "a runner-up without gradient",
        TOPK,
        "runner[:, None], moved, 0.0)",
        "runner[:, None], 0.0, 0.0)",
        select("margin"),
    ),
    Fault("few rows: inputs beyond the block", ROWS, "& (k < block_in) & (feature", "& (feature", multiply(3)),
    Fault("few rows: no gate", ROWS, "value = gate * tl.load(", "value = tl.load(", multiply(3)),
    Fault("few rows: the last entry", ROWS, "tl.where(mine, e + 1, 0)", "tl.where(mine, e, 0)", multiply(3)),
    Fault("few rows: no bias", ROWS, "tl.where(split == 0, added, 0.0)", "0 * added", multiply(3)),
    Fault("shared: each part has the bias", ROWS, "tl.where(split == 0, added, 0.0)", "added", small_shared),
    Fault("shared: shares overlap", ROWS, "tl.minimum(high, low + share)", "high", small_shared),
    Fault("shared: a step between shares", ROWS, "split * share\n", "split * (share + 1)\n", small_shared, slow=True),
    Fault("shared: the last part", ROWS, "in range(parts):", "in range(parts - 1):", small_shared),
    Fault(
        "few rows: bad rows pass",
        ROWS,
        '(tl.abs(value) < float("inf")).to(tl.int32) ^ 1',
        "(k < 0).to(tl.int32)",
        checks.check_bad_rows,
    ),
    Fault("lists: closed entries have a slot", LISTS, "tl.where(listed, slot, -1)", "slot", multiply(40), slow=True),
    Fault(
        "lists: a block twice counts once",
        LISTS,
        "total += tl.where(same",
        "total = tl.where(same",
        checks.check_closed_and_crowded,
    ),
    Fault(
        "tiles: the last slot",
        TILES,
        "product = tl.zeros([ROWS, OUTPUTS], tl.float32)",
        "product, listed = tl.zeros([ROWS, OUTPUTS], tl.float32), slot < high - 1",
        multiply(40),
    ),
    Fault(
        "tiles: a padded stride",
        TILES,
        "feature = (j * block_in + k).to(tl.int64)\n                in_input",
        "feature = (j * BLOCK_IN + k).to(tl.int64)\n                in_input",
        multiply(40),
    ),
    Fault("tiles: no bias", TILES, "+ start[None, :]", "", multiply(40)),
    Fault(
        "tiles: the last step of a deep block",
        TILES,
        "range(0, BLOCK_IN, DEPTH)",
        "range(0, BLOCK_IN - DEPTH + 1, 2 * DEPTH)",
        multiply(40, 20, 70, (40, 34)),
    ),
    Fault(
        "gradient of x: no gate",
        TILES,
        "+ gate[:, None] * product, mask=mask)\n        tl.debug_barrier()\n    if NEED_X",
        "+ product, mask=mask)\n        tl.debug_barrier()\n    if NEED_X",
        multiply(40),
    ),
    Fault(
        "gradient of the weight: no gate",
        TILES,
        "slope.to(tl.float32) * gate[None, :]",
        "slope.to(tl.float32)",
        multiply(40),
    ),
    Fault("gradient of gates: one part", LISTS, "part * slots.to", "0 * slots.to", multiply(33, 20, 280, (8, 140))),
    Fault("gradient of gates: closed ones", LISTS, "slot >= 0, other=0.0", "slot >= 0, other=1.0", multiply(40)),
    Fault("scores: no mean", SCORES, "value -= tl.load(mean", "tl.load(mean", checks.check_scores),
    Fault(
        "scores: the last input",
        SCORES,
        "mask=k < size, other=0.0)\n        if",
        "mask=k < size - 1, other=0.0)\n        if",
        checks.check_scores,
    ),
    Fault(
        "int8: no scale",
        ROWS,
        "stored.to(tl.float32) * steps",
        "stored.to(tl.float32)",
        lambda: checks.check_packed([3], ((20, 70, 40, 34),)),
    ),
    Fault("int4: no sign", ROWS, "nibble - 16", "nibble", lambda: checks.check_packed([3], ((20, 70, 40, 34),))),
    Fault("pooling: the first state", POOL, "mask=mask & first,", "mask=mask & (first == 0),", checks.check_pool),
    Fault("LSTM: the old cell", LSTM, "new = f * tl.load", "new = i * tl.load", small_lstm),
    Fault("LSTM: slope of tanh", LSTM, "slope_c * i * (1 - g * g)", "slope_c * i * (1 - g)", small_lstm, slow=True),
    Fault("GRU: the state past the product", GRU, "slope * z, mask=mask", "slope, mask=mask", small_gru),
    Fault("GRU: r outside of the sum", GRU, "other=0.0) + r * state_n", "other=0.0) + state_n", small_gru, slow=True),
    Fault("GRU: n's gradient in both sums", GRU, "slope_n * r, mask", "slope_n, mask", small_gru, slow=True),
    Fault(
        "recurrences: the gate's part of the state",
        STEPS,
        "grad[:, self.columns].addmm_(through, last)",
        "through.mm(last)",
        small_gru,
        slow=True,
    ),
]


@contextmanager
def broken(fault: Fault, folder: Path) -> Iterator[None]:
    """The package with a fault in one of its modules."""
    module = importlib.import_module(fault.module)
    source = Path(module.__file__).read_text()
    assert source.count(fault.right) == 1, f"{fault.name}: the text to change occurs {source.count(fault.right)} times"
    file = folder / f"faulty_{FAULTS.index(fault)}.py"
    file.write_text(source.replace(fault.right, fault.wrong))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    faulty = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = faulty
    spec.loader.exec_module(faulty)
    changed = []
    for name, right in list(vars(module).items()):
        if name.startswith("__") or getattr(faulty, name, right) is right:
            continue
        for user in map(importlib.import_module, MODULES):
            if vars(user).get(name) is right:
                changed.append((user, name, right))
                setattr(user, name, getattr(faulty, name))
    try:
        yield
    finally:
        for user, name, right in changed:
            setattr(user, name, right)
