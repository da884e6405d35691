"""A stack of LSTM layers on prepared packed layers: the numbers and the blocks of training, equal bits, bad input."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from blockgate.formats import FORMATS
from blockgate.formats.integers import IntegerFormat
from blockgate.grid import BlockGrid
from blockgate.ops import gate_scores, gated_linear, native, topk_gates
from blockgate.ops import packed_linear as packed
from blockgate.ops.gated_lstm import gated_lstm
from tests.helpers import assert_close

pytestmark = pytest.mark.skipif(native.unavailable_reason() is not None, reason="native kernels are not built")

INTEGERS = [name for name, known in FORMATS.items() if isinstance(known, IntegerFormat)]

# Input size, hidden size, block, options of the gates.
STACKS = [
    (24, 32, (16, 16), {}),
    (50, 33, (16, 24), {"per_row": True, "normalise": "rms"}),
    (24, 40, (40, 8), {"per_row": True, "normalise": "margin", "hidden": 7}),
    (7, 40, (40, 5), {"hidden": 6, "bias": False}),
    (20, 64, (128, 128), {"normalise": "none"}),
    (96, 96, (32, 32), {"dense": True}),
]


def step_by_step(product, projected, h, c):
    """The recurrence in plain torch around a product: output (T, N, H) and c_n."""
    output = []
    for start in projected:
        i, f, g, o = (start + product(h)).chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        output.append(h)
    return torch.stack(output), c


class Product:
    """One product of the stack: its parameters, its handle, and itself through the ops of training."""

    def __init__(self, inputs, outputs, block, name, *, hidden=None, per_row=False, normalise="mean", bias=True):
        self.grid, self.normalise, self.format = BlockGrid(outputs, inputs, block), normalise, FORMATS[name]
        self.groups = self.grid.out_blocks if per_row else 1
        self.open_blocks = max(1, round(self.grid.num_blocks / self.groups / 2))
        self.key_offset, self.key_size = inputs // 3, inputs - inputs // 3
        self.stored = packed.pack_blocks(torch.randn(outputs, inputs) * inputs**-0.5, block, name)
        self.weight = packed.unpack_blocks(*self.stored, (outputs, inputs, *block), name)
        self.bias = torch.randn(outputs) if bias else None
        self.gate = [torch.randn(self.grid.num_blocks, hidden or self.key_size), torch.randn(self.grid.num_blocks)]
        self.hidden = [torch.randn(hidden, self.key_size), torch.randn(hidden)] if hidden else [None, None]
        packed_gate = [
            None if w is None else packed.pack_blocks(w, w.shape, "float32")[0] for w in (self.gate[0], self.hidden[0])
        ]
        self.handle = packed.prepare_dynamic_linear(
            *self.stored, self.bias, (outputs, inputs, *block), name, packed_gate[0], self.gate[1], packed_gate[1],
            self.hidden[1], (self.key_offset, self.key_size), self.groups, normalise,
        )  # fmt: skip

    def __call__(self, rows):
        key = rows[:, self.key_offset : self.key_offset + self.key_size]
        if self.hidden[0] is not None:
            key = torch.relu(gate_scores(key, *self.hidden))
        scores = gate_scores(key, *self.gate)
        gates, indices = topk_gates(scores, self.open_blocks, groups=self.groups, normalise=self.normalise)
        rows = self.format.round_inputs(rows, self.grid)
        return gated_linear(rows, self.weight, self.bias, gates, indices, self.grid.block)

    def recurrence(self, projected, h, c):
        if isinstance(self.format, IntegerFormat):
            return step_by_step(self, projected, h, c)
        return gated_lstm(
            projected, h, c, self.weight, self.bias, *self.gate, *self.hidden, key_offset=self.key_offset,
            key_size=self.key_size, block=self.grid.block, open_blocks=self.open_blocks, groups=self.groups,
            normalise=self.normalise,
        )  # fmt: skip


class DenseProduct:
    """The same with every block open and no gate."""

    open_blocks = 0

    def __init__(self, inputs, outputs, block, name):
        self.stored = packed.pack_blocks(torch.randn(outputs, inputs) * inputs**-0.5, block, name)
        self.weight = packed.unpack_blocks(*self.stored, (outputs, inputs, *block), name)
        self.bias, self.grid, self.format = torch.randn(outputs), BlockGrid(outputs, inputs, block), FORMATS[name]
        self.handle = packed.prepare_packed_linear(*self.stored, self.bias, (outputs, inputs, *block), name)

    def __call__(self, rows):
        return nn.functional.linear(self.format.round_inputs(rows, self.grid), self.weight, self.bias)

    def recurrence(self, projected, h, c):
        return step_by_step(self, projected, h, c)


def make_stack(inputs, size, block, options, name, layers=2):
    options = dict(options)
    make = DenseProduct if options.pop("dense", False) else Product
    return [
        make(inputs if i == 0 else size, 4 * size, block, name, **options if make is Product else {})
        for i in range(2 * layers)
    ]


def run(stack, x, h, c):
    return packed.run_prepared_lstm(x, h, c, [p.handle for p in stack], [p.open_blocks for p in stack])


def expected(stack, x, h, c):
    """Through the ops of training, layer by layer; dense layers through nn.LSTM.

    Where weights are integers, with the inputs of every product rounded as packing promises.
    """
    if isinstance(stack[0], DenseProduct) and not isinstance(stack[0].format, IntegerFormat):
        lstm = nn.LSTM(x.shape[2], h.shape[2], len(stack) // 2)
        for i, product in enumerate(stack):
            suffix = f"{'ih' if i % 2 == 0 else 'hh'}_l{i // 2}"
            getattr(lstm, f"weight_{suffix}").copy_(product.weight)
            getattr(lstm, f"bias_{suffix}").copy_(product.bias)
        y, (h_n, c_n) = lstm(x, (h, c))
        return y, h_n, c_n
    last = []
    for layer in range(len(stack) // 2):
        projected = stack[2 * layer](x.flatten(0, 1)).view(*x.shape[:2], -1)
        x, c_n = stack[2 * layer + 1].recurrence(projected, h[layer], c[layer])
        last.append((x[-1], c_n))
    return x, *(torch.stack(s) for s in zip(*last, strict=True))


def problem(inputs, size, steps, rows, layers=2):
    return torch.randn(steps, rows, inputs), torch.randn(layers, rows, size), torch.randn(layers, rows, size)


@torch.no_grad()
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("steps", "rows"), [(1, 1), (5, 1), (1, 3), (4, 9), (3, 40)])
@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_results_equal_those_of_training(stack, steps, rows, name):
    products = make_stack(*stack, name)
    inputs = problem(stack[0], stack[1], steps, rows)
    # `expected` has the weights and inputs that packed products stand for, so only the order of sums differs. The sums
    # of int4, over groups, differ more than those of int8: rarely an input of the next layer falls into another step.
    for result, got, want in zip(("y", "h_n", "c_n"), run(products, *inputs), expected(products, *inputs), strict=True):
        if name == "int4":
            unit = max(1.0, want.abs().max().item())
            moved = (got - want).abs() > 1e-5 * unit + 1e-4 * want.abs()
            assert moved.float().mean() < 1e-3
            assert ((got - want).abs() < 1e-4 * unit).all()
            got = torch.where(moved, want, got)
        assert_close(got, want, result)


@torch.no_grad()
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_chunks_batches_and_threads_change_no_bit(stack, name):
    products = make_stack(*stack, name)
    x, h, c = problem(stack[0], stack[1], 6, 9)
    whole = run(products, x, h, c)

    state, parts = (h, c), []
    for chunk in x.split([1, 3, 1, 1]):
        y, *state = run(products, chunk, *state)
        parts.append(y)
    for got, want in zip((torch.cat(parts), *state), whole, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)

    for rows in ([4], [7, 8], list(range(8))):
        for got, want in zip(run(products, x[:, rows], h[:, rows], c[:, rows]), whole, strict=True):
            torch.testing.assert_close(got, want[:, rows], rtol=0, atol=0)

    before = torch.get_num_threads()
    try:
        for threads in (1, 5):
            torch.set_num_threads(threads)
            for got, want in zip(run(products, x, h, c), whole, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=0)
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("steps", [1, 4])
def test_many_threads_share_a_large_stack_without_changing_a_bit(steps, name):
    products = make_stack(256, 256, (64, 64), {}, name)
    inputs = problem(256, 256, steps, 1)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            results.append(run(products, *inputs))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("steps", [1, 3])
def test_the_blocks_that_training_closes_are_never_read(steps):
    """Weights of one recurrent product become NaN wherever training's gates are closed in every step."""
    stack = STACKS[0]
    products = make_stack(*stack, "float32", layers=1)
    x, h, c = problem(stack[0], stack[1], steps, 1, layers=1)
    recurrent = products[1]
    projected = products[0](x.flatten(0, 1)).view(steps, 1, -1)
    key = (recurrent.key_offset, recurrent.key_size)
    options = (key, recurrent.grid.block, (recurrent.open_blocks, 1), "mean")
    tensors = (projected, h[0], c[0], recurrent.weight, recurrent.bias, *recurrent.gate, None, None)
    *_, gates, indices = torch.ops.blockgate.gated_lstm(*tensors, *options)
    used = set(indices[gates != 0].tolist())
    closed = [b for b in range(recurrent.grid.num_blocks) if b not in used]
    assert closed
    want = run(products, x, h, c)
    blocks = recurrent.stored[0]
    blocks[closed] = float("nan")
    torch.testing.assert_close(run(products, x, h, c), want, rtol=0, atol=0)
    blocks[next(iter(used))] = float("nan")
    assert not torch.isfinite(run(products, x, h, c)[0]).all()


@torch.no_grad()
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("where", ["x", "h"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["float32", *INTEGERS])
def test_a_bad_value_spoils_its_row_alone(steps, where, value, name):
    products = make_stack(*STACKS[0], name)
    x, h, c = problem(24, 32, steps, 3)
    want = run(products, x, h, c)
    (x if where == "x" else h)[0, 1, 0] = value  # outside the key
    got = run(products, x, h, c)
    assert got[0][:, 1].isnan().all()
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours[:, [0, 2]], theirs[:, [0, 2]], rtol=0, atol=0)


@torch.no_grad()
def test_no_rows_or_no_steps():
    products = make_stack(*STACKS[0], "float32")
    for steps, rows in ((0, 2), (3, 0), (1, 0)):
        x, h, c = problem(24, 32, steps, rows)
        y, h_n, c_n = run(products, x, h, c)
        assert y.shape == (steps, rows, 32)
        torch.testing.assert_close((h_n, c_n), (h, c), rtol=0, atol=0)


@torch.no_grad()
def test_non_contiguous_inputs():
    products = make_stack(*STACKS[0], "float32")
    inputs = problem(24, 32, 4, 3)
    strided = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in inputs]
    torch.testing.assert_close(run(products, *strided), run(products, *inputs), rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", ["float32", *INTEGERS])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_prepared_dense_layer_is_a_linear_layer(rows, name):
    product, x = DenseProduct(30, 50, (16, 16), name), torch.randn(rows, 30)
    want = packed.dense_packed_linear(x, *product.stored, product.bias, (50, 30, 16, 16), name)
    torch.testing.assert_close(packed.run_prepared_linear(x, product.handle, 0), want, rtol=0, atol=0)
    packed.release_prepared_linear(product.handle)
    with pytest.raises(RuntimeError, match=f"handle: expected a prepared layer, got {product.handle}"):
        packed.run_prepared_linear(x, product.handle, 0)


@torch.no_grad()
def test_wrong_arguments_are_refused():
    products = make_stack(*STACKS[0], "float32")
    x, h, c = problem(24, 32, 2, 3)
    handles, opened = [p.handle for p in products], [p.open_blocks for p in products]
    wrong = [
        ((x[0], h, c, handles, opened), "x: expected 3 dimensions, got shape (3, 24)"),
        ((x.double(), h, c, handles, opened), "x: expected dtype Float, got Double"),
        ((x, h[:, :2], c, handles, opened), "h: expected size 3 in dimension 1, got shape (2, 2, 32)"),
        ((x, h, c[..., :30], handles, opened), "c: expected size 32 in dimension 2, got shape (2, 3, 30)"),
        ((x, h, c, handles[:3], opened), "handles: expected 4 numbers, two for each of the 2 layers, got 3"),
        ((x, h, c, handles, opened[1:]), "open_blocks: expected 4 numbers, two for each of the 2 layers, got 3"),
        ((x, h, c, [-1, *handles[1:]], opened), "handle: expected a prepared layer, got -1"),
        ((x[..., :20], h, c, handles, opened), "handles: expected 20 -> 128 features at position 0, got 24 -> 128"),
        ((x, h, c, [*handles[:2], handles[0], handles[3]], opened), "expected 32 -> 128 features at position 2"),
        ((x, h, c, handles, [0, *opened[1:]]), "open_blocks: expected 1 to"),
        ((x[:1], h, c, handles, [*opened[:3], 1000]), "open_blocks: expected 1 to"),
    ]
    for arguments, message in wrong:
        with pytest.raises(RuntimeError, match=re.escape(message)):
            packed.run_prepared_lstm(*arguments)
