"""The Triton kernels against the references, on tensors of the CPU: for a process with TRITON_INTERPRET=1.

Every check compares outputs and all gradients, and counts what it compared.
"""

from __future__ import annotations

import mmap
from collections import Counter
from itertools import product

import torch
from torch import Tensor

from blockgate.grid import BlockGrid
from blockgate.ops.forget_pool import reference as pool_reference
from blockgate.ops.forget_pool import triton as pool
from blockgate.ops.gate_scores import reference as scores_reference
from blockgate.ops.gate_scores import triton as gate
from blockgate.ops.gated_gru import reference as gru_reference
from blockgate.ops.gated_gru import triton as gru
from blockgate.ops.gated_linear import reference as linear_reference
from blockgate.ops.gated_linear import triton as linear
from blockgate.ops.gated_linear import triton_cut
from blockgate.ops.gated_lstm import reference as lstm_reference
from blockgate.ops.gated_lstm import triton as lstm
from blockgate.ops.gpu import FORMATS
from blockgate.ops.packed_linear import reference as packed_reference
from blockgate.ops.packed_linear import triton as packed
from blockgate.ops.topk_gates import reference as topk_reference
from blockgate.ops.topk_gates import triton as topk
from tests.helpers import TOLERANCE

COMPARED: Counter[str] = Counter()
RULES = topk.RULES
# (out, in, block): one block, ragged both ways, primes, blocks wider than a product's step, larger than the weight.
GRIDS = (
    (1, 1, (1, 1)),
    (5, 7, (2, 3)),
    (16, 16, (16, 16)),
    (37, 21, (8, 5)),
    (20, 70, (40, 34)),
    (50, 33, (17, 64)),
)


def same(what: str, actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Equal within the tolerance of `dtype`; NaN in the same places."""
    rtol, atol = TOLERANCE[dtype]
    finite = expected[expected.isfinite()].abs()
    atol *= max(1.0, finite.max().item()) if finite.numel() else 1.0
    expected = expected.to(actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{what}: {m}")
    COMPARED[what] += 1


def check_selection(shapes: list[tuple[int, int, int]], rules: tuple[str, ...] = RULES) -> None:
    """Selection of (rows, groups, size), with and without ties, for one to all open."""
    for (rows, groups, size), rule in product(shapes, rules):
        for k, ties in product(sorted({1, max(1, size - 1), size}), (False, True)):
            scores = torch.randn(rows, groups * size)
            scores = scores.round() * torch.tensor([1.0, -0.0])[torch.arange(groups * size) % 2] if ties else scores
            compare_selection(scores, (k, groups), rule)


def compare_selection(scores: Tensor, selection: tuple[int, int], rule: str) -> None:
    gates, indices = topk.topk_gates(scores, selection, rule)
    want, want_indices = topk_reference.topk_gates(scores, selection, rule)
    assert torch.equal(indices, want_indices), (selection, rule)
    same("gates", gates, want)
    if want.isfinite().all():
        grad = torch.randn_like(want)
        rest = (scores, want, want_indices, selection, rule)
        got = topk.topk_gates_backward(grad, *rest)
        same("scores' gradient", got, topk_reference.topk_gates_backward(grad, *rest))


def check_scores(rows: tuple[int, ...] = (0, 1, 4, 5)) -> None:
    """The gate's scores for few rows and more, of a key that is a part of a wider input."""
    for count, (scores, size) in product(rows, ((1, 1), (37, 130))):
        key = torch.randn(count, size + 3)[:, 2 : size + 2]
        rest = (torch.randn(scores, size), torch.randn(scores), torch.randn(size))
        same("centred scores", gate.centred_scores(key, *rest), scores_reference.centred_scores(key, *rest))
        for bias in (rest[1], None):
            got = torch.full((count, scores), torch.nan)
            gate.scores_into(got, key, rest[0], bias)
            same("scores", got, scores_reference.gate_scores(key, rest[0], bias))


def problem(rows: int, grid: BlockGrid, entries: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, weight, bias, gates and indices; some kept gates are 0."""
    x, weight = (
        torch.randn(rows, grid.in_features).to(dtype),
        torch.randn(grid.out_features, grid.in_features).to(dtype),
    )
    gates, indices = topk_reference.topk_gates(torch.randn(rows, grid.num_blocks), (entries, 1), "mean")
    return [x, weight, torch.randn(grid.out_features).to(dtype), gates, indices]


def check_linear(
    rows: list[int], grids: tuple = GRIDS, dtype: torch.dtype = torch.float32, densities: bool = True
) -> None:
    """The gated product and its gradients, for one, half and all blocks open."""
    for count, (m, n, block) in product(rows, grids):
        grid = BlockGrid(m, n, block)
        for entries in sorted(
            {1, -(-grid.num_blocks // 2), grid.num_blocks} if densities else {-(-grid.num_blocks // 2)}
        ):
            compare_linear(*problem(count, grid, entries, dtype), block, dtype)


def compare_linear(x, weight, bias, gates, indices, block, dtype=torch.float32, need=(True, True, True)) -> None:
    got = linear.gated_linear(x, weight, bias, gates, indices, block)
    wide = [None if t is None else t.float() for t in (x, weight, bias)]
    same("y", got, linear_reference.gated_linear(*wide, gates, indices, block), dtype)
    grad = torch.randn(len(x), len(weight)).to(dtype)
    grads = linear.gated_linear_backward(grad, x, weight, gates, indices, block, *need)
    want = linear_reference.gated_linear_backward(grad.float(), *wide[:2], gates, indices, block, *need)
    for name, ours, theirs in zip(("x", "weight", "gates"), grads, want, strict=True):
        same(f"gradient of {name}", ours, theirs, dtype)


def check_closed_and_crowded() -> None:
    """No block open, one block open to all rows, a block twice in a row, gates that cancel, indices out of order."""
    grid = BlockGrid(20, 26, (8, 9))
    for rows in (3, 40):
        x, weight, _, gates, indices = problem(rows, grid, 5)
        compare_linear(x, weight, None, torch.zeros_like(gates), indices, grid.block)
        compare_linear(x, weight, None, gates, indices.flip(1), grid.block)
        compare_linear(x, weight, None, torch.ones(rows, 1), torch.full((rows, 1), 4), grid.block)
        twice = torch.randint(0, grid.num_blocks, indices.shape)
        twice[::3] = twice[::3, :1]
        compare_linear(x, weight, None, gates, twice, grid.block)
        cancelling = torch.tensor([1.0, -1.0, 0.0, 2.0, 1.0]).expand(rows, 5)
        compare_linear(x, weight, None, cancelling, torch.tensor([2, 2, 2, 2, 7]).expand(rows, 5), grid.block)


def check_strides() -> None:
    """Inputs and weights that are not contiguous, and only some of the gradients."""
    grid = BlockGrid(20, 26, (8, 9))
    for rows in (3, 40):
        x, weight, bias, gates, indices = problem(rows, grid, 5)
        wide, turned = torch.randn(rows, 70)[:, 3:55:2], weight.t().contiguous().t()
        compare_linear(wide, turned, bias, gates.t().contiguous().t(), indices, grid.block)
    for need in ((True, False, False), (False, True, False), (False, False, True)):
        compare_linear(x, weight, bias, gates, indices, grid.block, need=need)


def check_bad_rows() -> None:
    """NaN or inf anywhere in a row of x, open or not, spoils this row and no other; so does a wrong index."""
    grid = BlockGrid(20, 26, (8, 9))
    for rows, value in product((3, 40), (float("nan"), float("inf"), float("-inf"))):
        x, weight, bias, gates, indices = problem(rows, grid, 1)
        x[1, 25], x[rows - 1, 0] = value, value
        got = linear.gated_linear(x, weight, bias, gates, indices, grid.block)
        same("y with bad rows", got, linear_reference.gated_linear(x, weight, bias, gates, indices, grid.block))
    for rows in (3, 40):
        x, weight, bias, gates, indices = problem(rows, grid, 2)
        want = linear_reference.gated_linear(x, weight, bias, gates, indices, grid.block)
        gates[1, 0], indices[1, 0], want[1] = 1.0, grid.num_blocks, float("nan")
        same("y with a wrong index", linear.gated_linear(x, weight, bias, gates, indices, grid.block), want)


def check_shared(numbers: tuple[int, ...] = (2, 3, 7), rows: tuple[int, ...] = (1, 3)) -> None:
    """The open blocks of an output shared by several programs: unequal shares, and programs without any."""
    grid, chosen = BlockGrid(10, 700, (4, 130)), triton_cut.splits_for
    try:
        for count, splits, entries in product(rows, numbers, (1, 9, 18)):
            triton_cut.splits_for = lambda *_, splits=splits: splits
            x, weight, bias, gates, indices = problem(count, grid, entries)
            indices = indices.flip(1) if splits == 3 else indices
            x[count - 1, 699] = float("inf") if count > 1 else 1.0
            got = linear.gated_linear(x, weight, bias, gates, indices, grid.block)
            want = linear_reference.gated_linear(x, weight, bias, gates, indices, grid.block)
            same("y from shared blocks", got, want)
    finally:
        triton_cut.splits_for = chosen


PACKED_GRIDS = ((20, 70, 40, 34), (37, 21, 18, 5), (16, 33, 16, 64))


def check_packed(rows: list[int], sizes: tuple = PACKED_GRIDS, dtype: torch.dtype = torch.float32) -> None:
    """Packed blocks of every format, gated and all open, against the weight that they stand for."""
    for count, name, grid in product(rows, FORMATS, sizes):
        cut = BlockGrid(grid[0], grid[1], grid[2:])
        x, weight, bias, gates, indices = problem(count, cut, -(-cut.num_blocks // 2))
        blocks, scale = packed_reference.pack_blocks(weight, grid[2:], name)
        unpacked = packed_reference.unpack_blocks(blocks, scale, grid, name)
        x = x.to(dtype)
        got = packed.packed_linear(x, blocks, scale, bias, gates, indices, grid, name)
        want = linear_reference.gated_linear(x.float(), unpacked, bias, gates, indices, grid[2:])
        same(f"packed {name}", got, want, dtype)
        got = packed.dense_packed_linear(x, blocks, scale, None, grid, name)
        same(f"packed {name}, all open", got, torch.nn.functional.linear(x.float(), unpacked), dtype)


def check_pool() -> None:
    """The Quasi-RNN's pooling: no step, one, some; features that do not fill a program."""
    for shape in ((0, 2, 3), (1, 1, 1), (5, 3, 43), (4, 2, 128)):
        z, f, first = torch.randn(shape), torch.rand(shape), torch.randn(shape[1:])
        states = pool_reference.forget_pool(z, f, first)
        same("states", pool.forget_pool(z, f, first), states)
        rest = (torch.randn(shape), z, f, first, states)
        for name, ours, theirs in zip(
            ("z", "f", "c0"), pool.forget_pool_backward(*rest), pool_reference.forget_pool_backward(*rest), strict=True
        ):
            same(f"gradient of {name}", ours, theirs)


def check_far_states() -> None:
    """The gradient of pooling where the last state lies 2^31 numbers behind the first: one program's part of it."""
    size, steps, width = 1 << 25, 65, 128
    # Memory that exists only where it is touched, and a tensor that shows its beginning.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = [mmap.mmap(-1, 4 * size * steps, flags=flags) for _ in range(6)]
    parts = [
        [torch.frombuffer(m, dtype=torch.float32, count=width, offset=4 * size * t) for t in range(steps)]
        for m in memory
    ]
    given = [torch.randn(steps, width), torch.randn(steps, width), torch.rand(steps, width), torch.randn(steps, width)]
    for there, values in zip(parts, given, strict=False):
        for part, value in zip(there, values, strict=True):
            part.copy_(value)
    first, grad_first = torch.randn(width), torch.empty(width)
    grad, z, f, states, *grads = (there[0] for there in parts)
    pool._backward[(1,)](grad, z, f, first, states, *grads, grad_first, steps, size, FEATURES=width)
    grad, z, f, states = (values[:, None] for values in given)
    want = pool_reference.forget_pool_backward(grad, z, f, first[None], states)
    for name, there, theirs in zip(("z", "f"), parts[4:], want, strict=False):
        same(f"far gradient of {name}", torch.stack(there), theirs[:, 0])
    same("far gradient of c0", grad_first, want[2][0])


def check_lstm(gates: tuple[tuple[int, str], ...] = tuple(product((0, 3), ("margin", "rms")))) -> None:
    """Three steps of an LSTM, with and without a hidden layer in the gate, and with either gradient missing."""
    steps, rows, size, block = 3, 3, 10, (8, 3)
    grid = BlockGrid(4 * size, size, block)
    for hidden, rule in gates:
        key, width = (2, 6), hidden or 6
        gate = (torch.randn(grid.num_blocks, width), torch.randn(grid.num_blocks))
        layer = (torch.randn(hidden, 6), torch.randn(hidden)) if hidden else (None, None)
        weight, bias = torch.randn(4 * size, size) / 2, torch.randn(4 * size)
        h0, c0 = torch.randn(rows, size), torch.randn(rows, size)
        options = (key, block, (2, grid.out_blocks), rule)
        inputs = (torch.randn(steps, rows, 4 * size), h0, c0, weight, bias, *gate, *layer, *options)
        want = lstm_reference.gated_lstm(*inputs)
        for ours, theirs in zip(lstm.gated_lstm(*inputs), want, strict=True):
            same("LSTM", ours, theirs)
        output, _, *kept = want
        for grads in ((torch.randn_like(output), torch.randn_like(c0)), (torch.randn_like(output), None)):
            rest = (weight, gate[0], layer[0], h0, c0, output, *kept, *grads, *options, True)
            for ours, theirs in zip(
                lstm.gated_lstm_backward(*rest), lstm_reference.gated_lstm_backward(*rest), strict=True
            ):
                same("gradients of the LSTM", ours, theirs)


def check_gru(gates: tuple[tuple[int, str], ...] = tuple(product((0, 3), ("margin", "rms")))) -> None:
    """Three steps of a GRU, with and without a hidden layer in the gate, and with the weight's gradient left out."""
    steps, rows, size, block = 3, 3, 10, (8, 3)
    grid = BlockGrid(3 * size, size, block)
    for hidden, rule in gates:
        key, width = (2, 6), hidden or 6
        gate = (torch.randn(grid.num_blocks, width), torch.randn(grid.num_blocks))
        layer = (torch.randn(hidden, 6), torch.randn(hidden)) if hidden else (None, None)
        weight, bias = torch.randn(3 * size, size) / 2, torch.randn(3 * size)
        options = (key, block, (2, grid.out_blocks), rule)
        inputs = (torch.randn(steps, rows, 3 * size), torch.randn(rows, size), weight, bias, *gate, *layer, *options)
        want = gru_reference.gated_gru(*inputs)
        for ours, theirs in zip(gru.gated_gru(*inputs), want, strict=True):
            same("GRU", ours, theirs)
        for need_weight in (True, False):
            rest = (weight, gate[0], layer[0], inputs[1], *want, torch.randn_like(want[0]), *options, need_weight)
            for ours, theirs in zip(
                gru.gated_gru_backward(*rest), gru_reference.gated_gru_backward(*rest), strict=True
            ):
                same("gradients of the GRU", ours, theirs)
