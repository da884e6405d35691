"""Packed columns: the native op against its reference, and the layer around it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.formats import FORMATS
from blockgate.formats.columns import IN_COLUMNS, pack_columns, unpack_columns
from blockgate.gates.norm import column_norms
from blockgate.grid import BlockGrid
from blockgate.ops import native
from blockgate.runtime.packed_columns import PackedColumnLinear
from tests.helpers import assert_close, raises_blockgate

NAMES = ["float32", "bfloat16", "float16", "int8", "int4"]
WORST = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11, "int8": 0.51 / 127, "int4": 0.51 / 7}

needs_kernels = pytest.mark.skipif(native.unavailable_reason() is not None, reason="no native kernels")


def case(outputs, inputs, block_out, rows, name):
    generator = torch.Generator().manual_seed(outputs * inputs + rows)
    weight = torch.randn(outputs, inputs, generator=generator)
    grid = BlockGrid(outputs, inputs, (block_out, 1))
    packed = pack_columns(weight, grid, name)
    x = torch.randn(rows, inputs, generator=generator)
    return x, packed, torch.randn(outputs, generator=generator), column_norms(weight, grid), grid, weight


def test_every_format_has_a_column_layout():
    assert set(IN_COLUMNS) == set(FORMATS)
    assert set(IN_COLUMNS.values()) == set(NAMES)
    layer = bg.DynamicSparseLinear(8, 32, block_size=(32, 1), sparsity=0.5, gate="norm")
    assert bg.pack(layer, "int8a8").format.name == "int8"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("outputs", "block_out"), [(1, 1), (37, 100), (300, 300), (300, 70)])
def test_columns_come_back(name, outputs, block_out):
    _, packed, _, _, grid, weight = case(outputs, 9, block_out, 1, name)
    back = unpack_columns(packed, grid, name)
    assert back.shape == weight.shape
    assert (back - weight).abs().max() <= WORST[name] * weight.abs().max()
    again = pack_columns(back, grid, name)
    assert_close(unpack_columns(again, grid, name), back)


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("outputs", "inputs", "block_out"), [(1, 1, 1), (5, 9, 2), (37, 50, 100), (300, 41, 300), (530, 64, 256)]
)
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 11])
def test_native_equals_reference(name, outputs, inputs, block_out, rows):
    x, packed, bias, norms, grid, _ = case(outputs, inputs, block_out, rows, name)
    sizes = [outputs, inputs, *grid.block]
    for kept in {1, (inputs + 1) // 2, inputs}:
        for added in (bias, None):
            arguments = (x, *packed, added, norms, sizes, kept, name)
            y = torch.ops.blockgate.column_linear(*arguments)
            assert_close(y, torch.ops.blockgate.column_linear_reference(*arguments), f"{kept} open")
            # Each row has the same bits, whatever it shares the batch with.
            for row in range(0, rows, 5):
                alone = torch.ops.blockgate.column_linear(x[row : row + 1], *arguments[1:])
                torch.testing.assert_close(alone[0], y[row], rtol=0, atol=0)


@needs_kernels
def test_threads_change_no_bit():
    x, packed, bias, norms, grid, _ = case(700, 600, 700, 6, "int8")
    arguments = (*packed, bias, norms, [700, 600, *grid.block], 400, "int8")
    results = on_threads((1, 2), lambda: [torch.ops.blockgate.column_linear(part, *arguments) for part in (x, x[:1])])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


@needs_kernels
def test_rows_of_blocks_stay_out_of_each_other():
    """Panels of 16 reach beyond blocks of 17, to where another thread may have written."""
    x, packed, bias, norms, grid, _ = case(1700, 60, 17, 6, "int8")
    arguments = (*packed, bias, norms, [1700, 60, *grid.block], 30, "int8")
    expected, found = on_threads(
        (1, 3), lambda: [torch.ops.blockgate.column_linear(x, *arguments) for _ in range(1000)]
    )
    assert all(torch.equal(y, expected[0]) for y in found)


def on_threads(numbers, call):
    """What `call` gives with each of these numbers of threads."""
    before, results = torch.get_num_threads(), []
    try:
        for threads in numbers:
            torch.set_num_threads(threads)
            results.append(call())
    finally:
        torch.set_num_threads(before)
    return results


@needs_kernels
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_lower_instruction_sets_agree(isa):
    code = """
import torch
from tests.runtime.test_packed_columns import NAMES, case
for name in NAMES:
    for rows in (1, 5):
        x, packed, bias, norms, grid, _ = case(300, 41, 70, rows, name)
        arguments = (x, *packed, bias, norms, [300, 41, *grid.block], 20, name)
        torch.testing.assert_close(
            torch.ops.blockgate.column_linear(*arguments), torch.ops.blockgate.column_linear_reference(*arguments),
            rtol=1e-4, atol=1e-4)
print("compared", torch.ops.blockgate.isa())
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "BLOCKGATE_ISA": isa},
    )
    if "BLOCKGATE_ISA" in result.stderr:
        pytest.skip(f"no {isa} here")
    assert f"compared {isa}" in result.stdout, result.stderr


def test_opcheck_and_mistakes():
    x, packed, bias, norms, grid, _ = case(20, 12, 8, 3, "int8")
    sizes = [20, 12, *grid.block]
    torch.library.opcheck(torch.ops.blockgate.column_linear, (x, *packed, bias, norms, sizes, 4, "int8"))
    if native.unavailable_reason() is None:
        with pytest.raises(RuntimeError, match="columns"):
            torch.ops.blockgate.column_linear(x, packed.blocks[:-1], packed.scale, bias, norms, sizes, 4, "int8")
        with pytest.raises(RuntimeError, match="format: expected float32, bfloat16, float16, int8 or int4 in columns"):
            torch.ops.blockgate.column_linear(x, *packed, bias, norms, sizes, 4, "int8a8")
        with pytest.raises(RuntimeError, match="open_blocks"):
            torch.ops.blockgate.column_linear(x, *packed, bias, norms, sizes, 13, "int8")
    with raises_blockgate("pack_columns: expected one of"):
        pack_columns(torch.randn(4, 4), BlockGrid(4, 4, 2), "int8")


def small_layer():
    return bg.DynamicSparseLinear(30, 20, gate="norm", block_size=(20, 1), sparsity=0.5)


@pytest.mark.parametrize("name", NAMES)
def test_packed_layer_follows_its_layer(name):
    layer = small_layer()
    fast = bg.pack(layer, name)
    assert type(fast) is PackedColumnLinear
    x = torch.randn(2, 3, 30)
    with torch.no_grad():
        # The same columns open as in the layer that it was packed from.
        assert torch.equal(fast.gates(x), layer.eval().gates(x))
        if name == "float32":
            assert_close(fast(x), layer(x))
        dense = (fast.gates(x).squeeze(-2) * x) @ fast.weight().T + layer.bias
        assert_close(fast(x), dense)
        bad = x.clone()
        bad[0, 1, 4] = torch.inf
        assert fast(bad)[0, 1].isnan().all()
        assert fast(bad)[1].isfinite().all()
        fast.sparsity = 0.9
        assert fast.gates(x).count_nonzero() == 6 * 3
    assert "columns" in repr(fast)
    assert bg.summary(fast, x).layers[0].gate_macs == 30
    with raises_blockgate("packed layer: expected an input without gradient"):
        fast(x.requires_grad_())


@pytest.mark.parametrize("name", NAMES)
def test_packed_layer_compiles_and_exports(name):
    layer = bg.DynamicSparseLinear(30, 40, gate="norm", block_size=(20, 1), sparsity=0.5)
    fast, x = bg.pack(layer, name), torch.randn(2, 30)
    with torch.no_grad():
        want = fast(x)
        compiled = torch.compile(fast, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), want, rtol=0, atol=0)
        torch.testing.assert_close(torch.export.export(fast, (x,)).module()(x), want, rtol=0, atol=0)
        fast.sparsity = 0.8
        other = compiled(x)
        torch.testing.assert_close(other, fast(x), rtol=0, atol=0)
        assert (other - want).abs().max() > 0


def test_packed_layer_loads_both_kinds_of_checkpoint():
    layer, other = small_layer(), small_layer()
    x = torch.randn(4, 30)
    fast, wanted = bg.pack(other, "int8"), bg.pack(layer, "int8")
    fast.load_state_dict(layer.state_dict())
    torch.testing.assert_close(fast(x), wanted(x), rtol=0, atol=0)
    fast = bg.pack(other, "int8")
    fast.load_state_dict(wanted.state_dict())
    torch.testing.assert_close(fast(x), wanted(x), rtol=0, atol=0)
    with raises_blockgate("columns: expected torch.int8"):
        fast.load_state_dict(bg.pack(layer, "bfloat16").state_dict())
    assert fast.half().columns.dtype is torch.int8


def test_wide_blocks_are_packed_as_ever():
    layer = bg.DynamicSparseLinear(32, 48, gate="norm", block_size=(16, 4), sparsity=0.5).eval()
    fast = bg.pack(layer, "float32")
    x = torch.randn(3, 32)
    with torch.no_grad():
        assert_close(fast(x), layer(x))
        twin = bg.pack(bg.DynamicSparseLinear(32, 48, gate="norm", block_size=(16, 4), sparsity=0.5), "float32")
        twin.load_state_dict(fast.state_dict())
        assert_close(twin(x), layer(x))


def test_models_are_packed_and_explained():
    model = nn.Sequential(nn.Linear(32, 40), nn.ReLU(), nn.Linear(40, 32))
    bg.sparsify_(model, gate="norm", block_size=(64, 1), sparsity=0.25)
    fast = bg.pack(model, "int8")
    x = torch.randn(1, 32)
    with torch.inference_mode():
        assert (fast(x) - model(x)).norm() / model(x).norm() < 0.05
        assert str(bg.explain(fast, x)).count("native" if native.unavailable_reason() is None else "reference") >= 2
    with raises_blockgate("save_pretrained: expected a model that is not packed"):
        bg.save_pretrained(fast, "nowhere")
