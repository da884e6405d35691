"""The layer among PyTorch's own tools: checkpoints, copies, dtypes, devices, torch.compile, torch.export."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import blockgate as bg
from tests.helpers import TOLERANCE, assert_close, raises_blockgate


def make(**options) -> bg.DynamicSparseLinear:
    return bg.DynamicSparseLinear(12, 10, **{"gate": "topk", "block_size": 3, "sparsity": 0.6, **options})


@pytest.fixture
def x():
    return torch.randn(4, 12)


@pytest.mark.parametrize(("gate", "more"), [("topk", []), ("margin", ["gate.key_mean"])])
def test_a_dense_checkpoint_loads_and_the_gate_is_reported_missing(gate, more):
    dense, layer = nn.Linear(12, 10), make(gate=gate)
    result = layer.load_state_dict(dense.state_dict(), strict=False)
    assert result.missing_keys == ["gate.weight", "gate.bias", *more]
    assert result.unexpected_keys == []
    torch.testing.assert_close(layer.weight, dense.weight)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"gate.weight\", \"gate.bias\""):
        layer.load_state_dict(dense.state_dict())


def test_state_dict_round_trip_with_sparsity(x):
    layer, other = make(sparsity=0.9), make(sparsity=0.1)
    state = layer.state_dict()
    assert state["gate.sparsity"].shape == ()
    other.load_state_dict(state)
    assert other.sparsity == 0.9
    torch.testing.assert_close(other(x), layer(x))


def test_a_checkpoint_without_sparsity_keeps_the_layer_s():
    layer = make(sparsity=0.3)
    state = {key: value for key, value in make(sparsity=0.9).state_dict().items() if key != "gate.sparsity"}
    layer.load_state_dict(state)
    assert layer.sparsity == 0.3


def test_torch_save_loads_safely(x):
    layer, other = make(sparsity=0.25), make()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    torch.testing.assert_close(other(x), layer(x))


def test_safetensors_round_trip(x, tmp_path):
    net, other = nn.Sequential(make(sparsity=0.7), nn.ReLU()), nn.Sequential(make(), nn.ReLU())
    save_model(net, tmp_path / "net.safetensors")
    load_model(other, tmp_path / "net.safetensors")
    assert other[0].sparsity == 0.7
    torch.testing.assert_close(other(x), net(x))


@pytest.mark.parametrize("gate", ["topk", "softmax_sum"])
def test_deepcopy_and_pickle(x, gate):
    layer = make(gate=gate, gate_hidden=4)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(twin(x), layer(x))
        twin.sparsity = 0.9
        assert layer.sparsity == 0.6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes_keep_the_sparsity_exact_and_the_result_close(x, dtype):
    layer = make(sparsity=0.9)
    want = layer(x.to(dtype).float())
    layer.to(dtype)
    y = layer(x.to(dtype))
    assert y.dtype == dtype
    assert layer.sparsity == 0.9
    assert layer.gates(x.to(dtype)).dtype == torch.promote_types(dtype, torch.float32)
    rtol, atol = TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(y.float(), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_the_gate_in_fp32(x, dtype):
    layer = make()
    want, gates = layer(x), layer.gates(x)
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)
        inside = layer.gates(x)
        from_half = layer(x.to(dtype))
        y.float().sum().backward()
    inside_grad = layer.gate.weight.grad.clone()
    layer.zero_grad()
    layer(x).to(dtype).float().sum().backward()
    assert_close(inside_grad, layer.gate.weight.grad)
    assert y.dtype == dtype
    assert from_half.dtype == dtype
    torch.testing.assert_close(inside, gates, rtol=0, atol=0)
    torch.testing.assert_close(y, want.to(dtype), rtol=0, atol=0)
    assert layer.gate.weight.grad.dtype == torch.float32


def test_meta_device_then_real(x):
    with torch.device("meta"):
        layer = make(sparsity=0.9)
    assert layer(torch.empty(2, 12, device="meta")).shape == (2, 10)
    source = make(sparsity=0.9)
    layer = layer.to_empty(device="cpu")
    layer.load_state_dict(source.state_dict())
    torch.testing.assert_close(layer(x), source(x))
    with torch.device("meta"):
        assigned = make()
    assigned.load_state_dict(source.state_dict(), assign=True)
    assert assigned.sparsity == 0.9
    torch.testing.assert_close(assigned(x), source(x))


@pytest.mark.parametrize("frozen", ["weight", "bias", "gate.weight", "gate.bias"])
def test_frozen_parts_get_no_gradient(x, frozen):
    layer = make()
    layer.get_parameter(frozen).requires_grad_(False)
    layer(x).square().sum().backward()
    assert {name for name, p in layer.named_parameters() if p.grad is None} == {frozen}


def test_functional_call_with_parameters_and_with_a_whole_state_dict(x):
    layer, other = make(), make()
    for values in (dict(other.named_parameters()), dict(other.state_dict())):
        torch.testing.assert_close(torch.func.functional_call(layer, values, x), other(x))


def test_leading_dimensions_empty_batches_and_strides(x):
    layer = make()
    assert layer(x[0]).shape == (10,)
    assert layer(torch.empty(0, 12)).shape == (0, 10)
    assert layer(torch.empty(3, 0, 12)).shape == (3, 0, 10)
    assert layer.gates(torch.empty(2, 0, 12)).shape == (2, 0, 4, 4)
    strided = torch.randn(12, 5).T
    assert_close(layer(strided), layer(strided.contiguous()))
    assert_close(layer(x.view(2, 2, 12)).view(4, 10), layer(x))
    empty = torch.empty(0, 12, requires_grad=True)
    layer(empty).sum().backward()
    assert layer.weight.grad.count_nonzero() == 0


@pytest.mark.parametrize(
    ("compiler", "backend", "select"),
    [("aot_eager", "auto", "global"), ("aot_eager", "reference", "per_row"), ("inductor", "auto", "global")],
)
def test_a_ramp_under_torch_compile_compiles_at_most_twice(x, compiler, backend, select):
    layer = make(sparsity=0.0, select=select, backend=backend)
    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for step in range(50):
        layer.sparsity = step / 50  # ends with a single open block
        y = compiled(x)
        y.square().sum().backward()
        assert_close(y, layer(x))
    assert layer.gate.open_blocks == 1
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_torch_compile_with_inductor(x):
    layer = make()
    compiled = torch.compile(layer, fullgraph=True)
    want = layer(x)
    (grad,) = torch.autograd.grad(want.square().sum(), layer.gate.weight)
    y = compiled(x)
    assert_close(y, want)
    y.square().sum().backward()
    assert_close(layer.gate.weight.grad, grad)


@pytest.mark.parametrize("gate", ["topk", "softmax_sum"])
def test_torch_export_with_a_dynamic_batch(x, gate):
    layer = make(gate=gate).eval()
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    for rows in (1, 4, 9):
        rows_in = torch.randn(rows, 12)
        assert_close(program.module()(rows_in), layer(rows_in))


def test_strict_export_works_too(x):
    layer = make().eval()
    assert_close(torch.export.export(layer, (x,), strict=True).module()(x), layer(x))


def test_forward_mode_derivatives_are_refused_clearly(x):
    layer = make()
    for call in (layer, bg.pack(layer)):
        with raises_blockgate("Gated layers have reverse-mode gradients only"):
            torch.func.jvp(call, (x,), (torch.ones_like(x),))


@pytest.mark.parametrize("gate", ["topk", "margin"])
def test_a_mix_of_devices_is_refused_and_never_computed(x, gate):
    with torch.device("meta"):
        layer = make(gate=gate)
    layer.load_state_dict(nn.Linear(12, 10).state_dict(), strict=False, assign=True)  # the gate stays on meta
    with raises_blockgate("gate input: expected shape (rows, 12) on meta, got '(4, 12) on cpu'"):
        layer(x)
    with raises_blockgate("blockgate::gate_scores: expected all tensors on one device, got ['cpu', 'meta']"):
        torch.ops.blockgate.gate_scores(x, torch.empty(3, 12, device="meta"), None)


def test_a_bad_sparsity_in_a_checkpoint_is_reported_by_name():
    layer = make(sparsity=0.5)
    for value in (torch.tensor(1.5), torch.tensor([0.1, 0.2]), "x"):
        with pytest.raises(RuntimeError, match=r"gate.sparsity: "):
            layer.load_state_dict(layer.state_dict() | {"gate.sparsity": value})
    assert layer.sparsity == 0.5


def test_second_derivatives_are_refused_clearly(x):
    layer = make()
    x.requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with raises_blockgate("Second derivatives of gated layers are not implemented"):
        grad.sum().backward()
