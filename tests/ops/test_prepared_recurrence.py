"""Stacks of LSTM or GRU layers on prepared layers: the numbers and blocks of training, equal bits, bad input."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from blockgate.formats import FORMATS
from blockgate.formats.integers import IntegerFormat
from blockgate.ops import native
from blockgate.ops import packed_linear as packed
from tests.helpers import assert_close
from tests.ops.prepared_problems import DenseProduct, make_stack
from tests.ops.recurrent_problems import EACH_CELL, GRU, LSTM

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


def run(stack, x, *state):
    op = packed.run_prepared_lstm if len(state) == 2 else packed.run_prepared_gru
    return op(x, *state, [p.handle for p in stack], [p.open_blocks for p in stack])


def expected(cell, stack, x, *state):
    """Through the ops of training, layer by layer; dense layers through torch's."""
    if isinstance(stack[0], DenseProduct):
        layer = (nn.LSTM if cell is LSTM else nn.GRU)(x.shape[2], state[0].shape[2], len(stack) // 2)
        for i, product in enumerate(stack):
            suffix = f"{'ih' if i % 2 == 0 else 'hh'}_l{i // 2}"
            getattr(layer, f"weight_{suffix}").copy_(product.weight)
            getattr(layer, f"bias_{suffix}").copy_(product.bias)
        y, last = layer(x, state if cell is LSTM else state[0])
        return y, *(last if cell is LSTM else (last,))
    last = []
    for layer in range(len(stack) // 2):
        projected = stack[2 * layer](x.flatten(0, 1)).view(*x.shape[:2], -1)
        x, *rest = stack[2 * layer + 1].recurrence(cell, projected, tuple(s[layer] for s in state))
        last.append((x[-1], *rest))
    return x, *(torch.stack(s) for s in zip(*last, strict=True))


def problem(inputs, size, steps, rows, layers=2, cell=LSTM):
    return torch.randn(steps, rows, inputs), *(torch.randn(layers, rows, size) for _ in range(cell.states))


SHAPES = pytest.mark.parametrize(("steps", "rows"), [(1, 1), (5, 1), (1, 3), (4, 9), (3, 40)])
FLOATS = [name for name in FORMATS if name not in INTEGERS]


@EACH_CELL
@torch.no_grad()
@pytest.mark.parametrize("name", FLOATS)
@SHAPES
@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_results_equal_those_of_training(stack, steps, rows, name, cell):
    products = make_stack(*stack, name, cell=cell)
    inputs = problem(stack[0], stack[1], steps, rows, cell=cell)
    for got, want in zip(run(products, *inputs), expected(cell, products, *inputs), strict=True):
        assert_close(got, want)


@EACH_CELL
@torch.no_grad()
@pytest.mark.parametrize("name", INTEGERS)
@SHAPES
@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_every_step_with_integer_weights_equals_one_of_rounded_inputs(stack, steps, rows, name, cell):
    """Each step is judged from the states that it was given: a rounding error more in one of them can move an input to
    another step of its integers, and what follows would differ by more than roundings."""
    products = make_stack(*stack, name, cell=cell)
    x, *first = problem(stack[0], stack[1], steps, rows, cell=cell)
    whole = run(products, x, *first)
    last = []
    for layer in range(2):
        of_input, of_state = pair = products[2 * layer : 2 * layer + 2]
        state, outputs = [s[layer : layer + 1] for s in first], []
        for x_t in x:
            want = cell.step(of_input(x_t), of_state(state[0][0]), [s[0] for s in state])
            y, *state = run(pair, x_t.unsqueeze(0), *state)
            for got, wanted in zip(state, want, strict=True):
                assert_close(got[0], wanted)
            outputs.append(y)
        x = torch.cat(outputs)
        last.append(state)
    for got, want in zip(whole, (x, *map(torch.cat, zip(*last, strict=True))), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@EACH_CELL
@torch.no_grad()
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_chunks_batches_and_threads_change_no_bit(stack, name, cell):
    products = make_stack(*stack, name, cell=cell)
    x, *first = problem(stack[0], stack[1], 6, 9, cell=cell)
    whole = run(products, x, *first)

    state, parts = first, []
    for chunk in x.split([1, 3, 1, 1]):
        y, *state = run(products, chunk, *state)
        parts.append(y)
    for got, want in zip((torch.cat(parts), *state), whole, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)

    for rows in ([4], [7, 8], list(range(8))):
        for got, want in zip(run(products, x[:, rows], *(s[:, rows] for s in first)), whole, strict=True):
            torch.testing.assert_close(got, want[:, rows], rtol=0, atol=0)

    before = torch.get_num_threads()
    try:
        for threads in (1, 5):
            torch.set_num_threads(threads)
            for got, want in zip(run(products, x, *first), whole, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=0)
    finally:
        torch.set_num_threads(before)


@EACH_CELL
@torch.no_grad()
@pytest.mark.parametrize("name", ["float32", *INTEGERS])
@pytest.mark.parametrize("steps", [1, 4])
def test_many_threads_share_a_large_stack_without_changing_a_bit(steps, name, cell):
    products = make_stack(256, 256, (64, 64), {}, name, cell=cell)
    inputs = problem(256, 256, steps, 1, cell=cell)
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


@EACH_CELL
@torch.no_grad()
@pytest.mark.parametrize("steps", [1, 3])
def test_the_blocks_that_training_closes_are_never_read(steps, cell):
    """Weights of one recurrent product become NaN wherever training's gates are closed in every step."""
    stack = STACKS[0]
    products = make_stack(*stack, "float32", layers=1, cell=cell)
    x, *state = problem(stack[0], stack[1], steps, 1, layers=1, cell=cell)
    recurrent = products[1]
    projected = products[0](x.flatten(0, 1)).view(steps, 1, -1)
    key = (recurrent.key_offset, recurrent.key_size)
    options = (key, recurrent.grid.block, (recurrent.open_blocks, 1), "mean")
    tensors = (projected, *(s[0] for s in state), recurrent.weight, recurrent.bias, *recurrent.gate, None, None)
    *_, gates, indices = getattr(torch.ops.blockgate, cell.name)(*tensors, *options)
    used = set(indices[gates != 0].tolist())
    closed = [b for b in range(recurrent.grid.num_blocks) if b not in used]
    assert closed
    want = run(products, x, *state)
    blocks = recurrent.stored[0]
    blocks[closed] = float("nan")
    torch.testing.assert_close(run(products, x, *state), want, rtol=0, atol=0)
    blocks[next(iter(used))] = float("nan")
    assert not torch.isfinite(run(products, x, *state)[0]).all()


@EACH_CELL
@torch.no_grad()
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("where", ["x", "h"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["float32", *INTEGERS])
def test_a_bad_value_spoils_its_row_alone(steps, where, value, name, cell):
    products = make_stack(*STACKS[0], name, cell=cell)
    x, h, *c = problem(24, 32, steps, 3, cell=cell)
    want = run(products, x, h, *c)
    (x if where == "x" else h)[0, 1, 0] = value  # outside the key
    got = run(products, x, h, *c)
    assert got[0][:, 1].isnan().all()
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours[:, [0, 2]], theirs[:, [0, 2]], rtol=0, atol=0)


@EACH_CELL
@torch.no_grad()
def test_no_rows_or_no_steps(cell):
    products = make_stack(*STACKS[0], "float32", cell=cell)
    for steps, rows in ((0, 2), (3, 0), (1, 0)):
        x, *state = problem(24, 32, steps, rows, cell=cell)
        y, *last = run(products, x, *state)
        assert y.shape == (steps, rows, 32)
        torch.testing.assert_close(last, state, rtol=0, atol=0)


@EACH_CELL
@torch.no_grad()
def test_non_contiguous_inputs(cell):
    products = make_stack(*STACKS[0], "float32", cell=cell)
    inputs = problem(24, 32, 4, 3, cell=cell)
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


@torch.no_grad()
def test_wrong_arguments_of_a_gru_are_refused():
    products = make_stack(*STACKS[0], "float32", cell=GRU)
    x, h = problem(24, 32, 2, 3, cell=GRU)
    handles, opened = [p.handle for p in products], [p.open_blocks for p in products]
    wrong = [
        ((x, h[:, :2], handles, opened), "h: expected size 3 in dimension 1, got shape (2, 2, 32)"),
        ((x, h, handles[:3], opened), "handles: expected 4 numbers, two for each of the 2 layers, got 3"),
        ((x[..., :20], h, handles, opened), "handles: expected 20 -> 96 features at position 0, got 24 -> 96"),
    ]
    for arguments, message in wrong:
        with pytest.raises(RuntimeError, match=re.escape(message)):
            packed.run_prepared_gru(*arguments)
