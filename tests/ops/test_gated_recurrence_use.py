"""What users of the gated recurrences rely on: torch's numbers, equal bits, strides, bad input."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from blockgate.grid import BlockGrid
from blockgate.ops import gate_scores, native, topk_gates
from tests.helpers import assert_close
from tests.ops.recurrent_problems import CASES, EACH_CELL, GRU, LSTM, Case, named_gradients, problem

BACKENDS = ["auto", "reference"]


@EACH_CELL
@torch.no_grad()
def test_all_blocks_open_with_gate_one_is_torchs_layer(cell):
    size, steps, rows = 24, 5, 3
    dense = (nn.LSTM if cell is LSTM else nn.GRU)(size, size)
    x, state = torch.randn(steps, rows, size), tuple(torch.randn(1, rows, size) for _ in range(cell.states))
    want, last = dense(x, state if cell is LSTM else state[0])
    grid = BlockGrid(cell.gates * size, size, 8)
    got, *got_c = cell.run(
        nn.functional.linear(x, dense.weight_ih_l0, dense.bias_ih_l0),
        *(s[0] for s in state),
        dense.weight_hh_l0,
        dense.bias_hh_l0,
        torch.zeros(grid.num_blocks, size),
        torch.ones(grid.num_blocks),
        None,
        None,
        key_offset=0,
        key_size=size,
        block=grid.block,
        open_blocks=grid.num_blocks,
    )
    assert_close(got, want)
    for c in got_c:
        assert_close(c, last[1][0])


@EACH_CELL
@torch.no_grad()
def test_the_cell_is_accurate_over_its_whole_range(cell):
    # No block opens: the sums that enter the cell are `projected` itself.
    values = torch.cat([torch.linspace(-100, 100, 501), torch.logspace(-30, 2, 100), -torch.logspace(-30, 2, 100)])
    size, gates = len(values), cell.gates
    projected = torch.zeros(1, gates, gates, size)  # row r: the values enter gate r
    projected[0, range(gates), range(gates)] = values
    projected = projected.flatten(2)
    state = (torch.zeros(gates, size), values.expand(gates, size).contiguous())[: cell.states]
    grid = BlockGrid(gates * size, size, size)
    arguments = (*state, torch.zeros(gates * size, size), None)
    gate = (torch.zeros(grid.num_blocks, 1), -torch.ones(grid.num_blocks), None, None)
    options = {"key_offset": 0, "key_size": 1, "block": grid.block, "open_blocks": 1}
    got = cell.run(projected, *arguments, *gate, **options)
    wide = [t if t is None else t.double() for t in (projected, *arguments, *gate)]
    for ours, want in zip(got, cell.run(*wide, **options, backend="reference"), strict=True):
        torch.testing.assert_close(ours.double(), want, rtol=1e-6, atol=1e-36)


@EACH_CELL
@torch.no_grad()
@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_and_threads_change_no_bit(case, cell):
    tensors, options = problem(Case(**{**vars(case), "steps": 5}), cell=cell)
    whole = cell.run(*tensors, **options)
    projected, *state = tensors[: 1 + cell.states]
    parts = []
    for chunk in projected.split([1, 3, 1]):
        output, *rest = cell.run(chunk, *state, *tensors[1 + cell.states :], **options)
        state = [output[-1], *rest]
        parts.append(output)
    for got, want in zip((torch.cat(parts), *state[1:]), whole, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@EACH_CELL
@pytest.mark.parametrize(
    "case",
    [Case(4, 20, 256, (32, 32)), Case(3, 9, 200, (64, 48), 0.3, hidden=20), Case(3, 20, 150, (64, 4))],
    ids=str,
)
def test_threads_change_no_bit(case, cell):
    tensors, options = problem(case, cell=cell)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            made = cell.run(*tensors, **options)
            gradients = named_gradients(made, tensors, [torch.ones_like(t) for t in made])
            # The gate's own weights go through torch's matrix product, which promises no bits.
            mine = {n: g for n, g in gradients.items() if n in {"projected", "h0", "c0", "weight"}}
            results.append([*made, *mine.values()])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@EACH_CELL
@torch.no_grad()
def test_training_selects_as_the_separate_ops_do(cell):
    tensors, options = problem(Case(3, 6, 64, (16, 16)), cell=cell)
    opened = options["open_blocks"]
    plain = ((options["key_offset"], options["key_size"]), options["block"], (opened, 1), "mean")
    output, *_, scores, gates, indices = getattr(torch.ops.blockgate, cell.name)(*tensors, *plain)
    before = torch.cat([tensors[1][None], output[:-1]])
    for t, h in enumerate(before):
        separate = gate_scores(h, *tensors[-4:-2])
        torch.testing.assert_close(scores[t], separate, rtol=0, atol=0)
        for ours, theirs in zip((gates[t], indices[t]), topk_gates(separate, opened), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@EACH_CELL
@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", [CASES[0], CASES[1]], ids=str)
def test_a_bad_state_spoils_its_row_alone(case, value, backend, cell):
    tensors, options = problem(Case(**{**vars(case), "rows": 3}), cell=cell)
    want, *_ = cell.run(*tensors, **options, backend=backend)
    tensors[1][1, -1] = value  # outside the key in one of the cases
    got, *_ = cell.run(*tensors, **options, backend=backend)
    assert got[:, 1].isnan().all()
    assert_close(got[:, [0, 2]], want[:, [0, 2]])


@EACH_CELL
def test_non_contiguous_inputs(cell):
    tensors, options = problem(Case(3, 4, 12, (5, 4), hidden=3), cell=cell)
    strided = [None if t is None else torch.stack([t, t], -1)[..., 0].detach().requires_grad_() for t in tensors]
    strided = [t if t is None or t.dim() < 2 else t.transpose(0, 1).contiguous().transpose(0, 1) for t in strided]
    want, got = (cell.run(*inputs, **options) for inputs in (tensors, strided))
    assert not strided[0].is_contiguous()
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    grad = torch.randn(4, 3, 12).transpose(0, 1)
    expected = named_gradients(want[:1], tensors, [grad])
    for name, ours in named_gradients(got[:1], strided, [grad.contiguous()]).items():
        assert_close(ours, expected[name], name)


@EACH_CELL
def test_half_precision_is_computed_in_float32(cell):
    tensors, options = problem(Case(3, 2, 16, (4, 4)), cell=cell)
    half = [None if t is None else t.detach().bfloat16() for t in tensors]
    wanted = cell.run(*(None if t is None else t.float() for t in half), **options)
    for got, want in zip(cell.run(*half, **options), wanted, strict=True):
        torch.testing.assert_close(got, want.bfloat16(), rtol=0, atol=0)


@EACH_CELL
@pytest.mark.usefixtures("nan_filled_memory")
def test_every_cell_of_every_result_is_written(cell):
    tensors, options = problem(Case(3, 4, 21, (8, 5), 0.3, hidden=5), cell=cell)
    made = cell.run(*tensors, **options)
    for name, gradient in named_gradients(made, tensors, made).items():
        assert torch.isfinite(gradient).all(), name


SIZES = [
    ("c0", (3, 12), "c0: expected size 2 in dimension 0, got shape (3, 12)"),
    ("gate_weight", (30, 11), "gate_weight: expected size 12 in dimension 1"),
]
SIZES_OF_CELLS = {
    LSTM: [
        ("projected", (3, 2, 44), "projected: expected size 48 in dimension 2, got shape (3, 2, 44)"),
        ("projected", (0, 2, 48), "gated_lstm: expected at least one step, row and hidden unit, got 0, 2 and 12"),
        ("h0", (2, 11), "weight: expected shape (44, 11), got (48, 12)"),
        ("weight", (12, 48), "weight: expected shape (48, 12), got (12, 48)"),
        ("bias", (47,), "bias: expected size 48 in dimension 0"),
        ("gate_weight", (29, 12), "gate_weight: expected size 30 in dimension 0"),
        ("gate_bias", (29,), "gate_bias: expected size 30 in dimension 0"),
        *SIZES,
    ],
    GRU: [
        ("projected", (3, 2, 48), "projected: expected size 36 in dimension 2, got shape (3, 2, 48)"),
        ("projected", (0, 2, 36), "gated_gru: expected at least one step, row and hidden unit, got 0, 2 and 12"),
        ("h0", (2, 11), "weight: expected shape (33, 11), got (36, 12)"),
        ("weight", (48, 12), "weight: expected shape (36, 12), got (48, 12)"),
        ("bias", (35,), "bias: expected size 36 in dimension 0"),
        ("gate_weight", (30, 12), "gate_weight: expected size 24 in dimension 0"),
        ("gate_bias", (29,), "gate_bias: expected size 24 in dimension 0"),
    ],
}


@pytest.mark.skipif(native.unavailable_reason() is not None, reason="native kernels are not built")
@pytest.mark.parametrize(
    ("cell", "name", "shape", "message"),
    [
        pytest.param(cell, *size, id=f"{cell.name}-{size[0]}")
        for cell, sizes in SIZES_OF_CELLS.items()
        for size in sizes
    ],
)
def test_wrong_sizes_are_refused(cell, name, shape, message):
    tensors, options = problem(Case(3, 2, 12, (5, 4)), cell=cell)
    tensors[cell.names.index(name)] = torch.zeros(shape)
    with pytest.raises(RuntimeError) as caught:
        cell.run(*tensors, **options)
    assert message in str(caught.value)


@EACH_CELL
@pytest.mark.skipif(native.unavailable_reason() is not None, reason="native kernels are not built")
def test_a_key_outside_the_state_is_refused(cell):
    tensors, options = problem(Case(3, 2, 12, (5, 4)), cell=cell)
    with pytest.raises(RuntimeError, match=r"key: expected a part of the 12 hidden units, got 12 from 6 on"):
        cell.run(*tensors, **{**options, "key_offset": 6})
