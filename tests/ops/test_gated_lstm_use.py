"""What users of the gated LSTM rely on: nn.LSTM's numbers, equal bits, strides, bad input."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from blockgate.grid import BlockGrid
from blockgate.ops import gate_scores, native, topk_gates
from blockgate.ops.gated_lstm import gated_lstm
from tests.helpers import assert_close
from tests.ops.lstm_problems import CASES, NAMES, Case, named_gradients, problem

BACKENDS = ["auto", "reference"]


@torch.no_grad()
def test_all_blocks_open_with_gate_one_is_nn_lstm():
    size, steps, rows = 24, 5, 3
    lstm = nn.LSTM(size, size)
    x, h, c = torch.randn(steps, rows, size), torch.randn(1, rows, size), torch.randn(1, rows, size)
    want, (_, want_c) = lstm(x, (h, c))
    grid = BlockGrid(4 * size, size, 8)
    got, got_c = gated_lstm(
        nn.functional.linear(x, lstm.weight_ih_l0, lstm.bias_ih_l0),
        h[0],
        c[0],
        lstm.weight_hh_l0,
        lstm.bias_hh_l0,
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
    assert_close(got_c, want_c[0])


@torch.no_grad()
def test_the_cell_is_accurate_over_its_whole_range():
    # No block opens: the sums that enter the cell are `projected` itself.
    values = torch.cat([torch.linspace(-100, 100, 501), torch.logspace(-30, 2, 100), -torch.logspace(-30, 2, 100)])
    size = len(values)
    projected = torch.zeros(1, 4, 4, size)  # row r: the values enter gate r
    projected[0, range(4), range(4)] = values
    projected = projected.flatten(2)
    c0 = values.expand(4, size).contiguous()
    grid = BlockGrid(4 * size, size, size)
    arguments = (torch.zeros(4, size), c0, torch.zeros(4 * size, size), None)
    gate = (torch.zeros(grid.num_blocks, 1), -torch.ones(grid.num_blocks), None, None)
    options = {"key_offset": 0, "key_size": 1, "block": grid.block, "open_blocks": 1}
    got, got_c = gated_lstm(projected, *arguments, *gate, **options)
    wide = [t if t is None else t.double() for t in (projected, *arguments, *gate)]
    want, want_c = gated_lstm(*wide, **options, backend="reference")
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-36)
    torch.testing.assert_close(got_c.double(), want_c, rtol=1e-6, atol=1e-36)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_and_threads_change_no_bit(case):
    tensors, options = problem(Case(**{**vars(case), "steps": 5}))
    whole = gated_lstm(*tensors, **options)
    projected, h, c, *weights = tensors
    parts = []
    for chunk in projected.split([1, 3, 1]):
        output, c = gated_lstm(chunk, h, c, *weights, **options)
        h = output[-1]
        parts.append(output)
    torch.testing.assert_close(torch.cat(parts), whole[0], rtol=0, atol=0)
    torch.testing.assert_close(c, whole[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    "case",
    [Case(4, 20, 256, (32, 32)), Case(3, 9, 200, (64, 48), 0.3, hidden=20), Case(3, 20, 150, (64, 4))],
    ids=str,
)
def test_threads_change_no_bit(case):
    tensors, options = problem(case)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            output, c_n = gated_lstm(*tensors, **options)
            gradients = named_gradients((output, c_n), tensors, (torch.ones_like(output), torch.ones_like(c_n)))
            # The gate's own weights go through torch's matrix product, which promises no bits.
            mine = {n: g for n, g in gradients.items() if n in {"projected", "h0", "c0", "weight"}}
            results.append([output, c_n, *mine.values()])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@torch.no_grad()
def test_training_selects_as_the_separate_ops_do():
    tensors, options = problem(Case(3, 6, 64, (16, 16)))
    opened = options["open_blocks"]
    plain = ((options["key_offset"], options["key_size"]), options["block"], (opened, 1), "mean")
    output, _, _, _, _, scores, gates, indices = torch.ops.blockgate.gated_lstm(*tensors, *plain)
    before = torch.cat([tensors[1][None], output[:-1]])
    for t, h in enumerate(before):
        separate = gate_scores(h, tensors[5], tensors[6])
        torch.testing.assert_close(scores[t], separate, rtol=0, atol=0)
        for ours, theirs in zip((gates[t], indices[t]), topk_gates(separate, opened), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", [CASES[0], CASES[1]], ids=str)
def test_a_bad_state_spoils_its_row_alone(case, value, backend):
    tensors, options = problem(Case(**{**vars(case), "rows": 3}))
    want, _ = gated_lstm(*tensors, **options, backend=backend)
    tensors[1][1, -1] = value  # outside the key in one of the cases
    got, _ = gated_lstm(*tensors, **options, backend=backend)
    assert got[:, 1].isnan().all()
    assert_close(got[:, [0, 2]], want[:, [0, 2]])


def test_non_contiguous_inputs():
    tensors, options = problem(Case(3, 4, 12, (5, 4), hidden=3))
    strided = [None if t is None else torch.stack([t, t], -1)[..., 0].detach().requires_grad_() for t in tensors]
    strided = [t if t is None or t.dim() < 2 else t.transpose(0, 1).contiguous().transpose(0, 1) for t in strided]
    want, got = (gated_lstm(*inputs, **options) for inputs in (tensors, strided))
    assert not strided[0].is_contiguous()
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    grad = torch.randn(4, 3, 12).transpose(0, 1)
    expected = named_gradients(want[:1], tensors, [grad])
    for name, ours in named_gradients(got[:1], strided, [grad.contiguous()]).items():
        assert_close(ours, expected[name], name)


def test_half_precision_is_computed_in_float32():
    tensors, options = problem(Case(3, 2, 16, (4, 4)))
    half = [None if t is None else t.detach().bfloat16() for t in tensors]
    output, c_n = gated_lstm(*half, **options)
    want, want_c = gated_lstm(*(None if t is None else t.float() for t in half), **options)
    torch.testing.assert_close(output, want.bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(c_n, want_c.bfloat16(), rtol=0, atol=0)


@pytest.mark.usefixtures("nan_filled_memory")
def test_every_cell_of_every_result_is_written():
    tensors, options = problem(Case(3, 4, 21, (8, 5), 0.3, hidden=5))
    output, c_n = gated_lstm(*tensors, **options)
    for name, gradient in named_gradients((output, c_n), tensors, (output, c_n)).items():
        assert torch.isfinite(gradient).all(), name


@pytest.mark.skipif(native.unavailable_reason() is not None, reason="native kernels are not built")
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("projected", (3, 2, 44), "projected: expected size 48 in dimension 2, got shape (3, 2, 44)"),
        ("projected", (0, 2, 48), "expected at least one step, row and hidden unit, got 0, 2 and 12"),
        ("h0", (2, 11), "weight: expected shape (44, 11), got (48, 12)"),
        ("c0", (3, 12), "c0: expected size 2 in dimension 0, got shape (3, 12)"),
        ("weight", (12, 48), "weight: expected shape (48, 12), got (12, 48)"),
        ("bias", (47,), "bias: expected size 48 in dimension 0"),
        ("gate_weight", (29, 12), "gate_weight: expected size 30 in dimension 0"),
        ("gate_weight", (30, 11), "gate_weight: expected size 12 in dimension 1"),
        ("gate_bias", (29,), "gate_bias: expected size 30 in dimension 0"),
    ],
)
def test_wrong_sizes_are_refused(name, shape, message):
    tensors, options = problem(Case(3, 2, 12, (5, 4)))
    tensors[NAMES.index(name)] = torch.zeros(shape)
    with pytest.raises(RuntimeError) as caught:
        gated_lstm(*tensors, **options)
    assert message in str(caught.value)


@pytest.mark.skipif(native.unavailable_reason() is not None, reason="native kernels are not built")
def test_a_key_outside_the_state_is_refused():
    tensors, options = problem(Case(3, 2, 12, (5, 4)))
    with pytest.raises(RuntimeError, match=r"key: expected a part of the 12 hidden units, got 12 from 6 on"):
        gated_lstm(*tensors, **{**options, "key_offset": 6})
